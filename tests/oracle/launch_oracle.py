"""How a run of several ranks ends: an error, a crash, a kill, a stop or a hang of one rank, and signals.

Cases that begin with a fault run marrow itself, with a fault at one place of one rank. Each other case starts build/test_mpi's small run (tests/mpi/scenario.h) under `launch_ranks`, as marrow pretrain
--processes does, or under mpirun or a torchrun-like environment. Checked: the exit code, that the first
error stands last and names its rank, the time it took, and that no process is left.
"""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BINARY = Path(os.environ.get("MARROW", str(ROOT / "build/marrow"))).parent / "test_mpi"
FAULTY = BINARY.parent / "test_faults"  # marrow with MARROW_TEST_FAULT, tests/faults/fault_points.cpp
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
SLOW = 60  # seconds; a machine with one busy core needs most of it to start the ranks

FAULTY_RUN = """[model]
config = "FOLDER/model.json"
[data]
train = ["FOLDER/corpus"]
seq_len = 32
[mesh]
dp = 2
ep = 2
[train]
steps = 6
global_batch = 8
cpu_threads = 1
[optimizer]
lr = 1e-3
[checkpoint]
every = 2
[log]
dir = "FOLDER/run"
"""


def left_over(folder):
    """Processes whose command line names the run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            pass
    return found


class Run:
    def __init__(self, name, rank, seconds, *words, mpirun=0, environment=None):
        self.scratch = tempfile.TemporaryDirectory(prefix="marrow-launch-")
        self.folder = self.scratch.name + "/run"
        command = [BINARY, "--scenario", name, self.folder, rank, seconds, *words]
        if mpirun:
            command = [*MPIRUN, "-n", mpirun, *command]
        self.name, self.start = f"{name} {' '.join(map(str, words))}", time.monotonic()
        self.process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.PIPE, env={**ENVIRONMENT, **(environment or {})})

    def records(self):
        """When every rank has its record: the ranks are at work."""
        return sorted(Path(self.folder, "ranks").glob("rank-*"))

    def ranks(self):
        """Ranks as mpirun has started them, whatever they have come to."""
        found = []
        for process in left_over(self.folder):
            parent = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{process}/status").read_text(), re.M).group(1)
            if Path(f"/proc/{parent}/comm").read_text().strip() == "mpirun":
                found.append(int(process))
        return found

    def wait_for_ranks(self, ranks):
        while len(self.records()) < ranks or not all(path.stat().st_size for path in self.records()):
            assert self.process.poll() is None and time.monotonic() - self.start < SLOW, f"{self.name}: no ranks"
            time.sleep(0.02)

    def end(self, code, *texts):
        out, err = self.process.communicate(timeout=SLOW)
        assert self.process.returncode == code, f"{self.name}: exit {self.process.returncode}, {code} wanted\n{out}{err}"
        for text in texts:
            assert text in err, f"{self.name}: no {text!r} in\n{err}"
        deadline = time.monotonic() + 10
        while left_over(self.folder):
            assert time.monotonic() < deadline, f"{self.name}: left over: {left_over(self.folder)}"
            time.sleep(0.05)
        return out, err


def last_error(err):
    """The text from the last "error: " on; it is all that may follow."""
    at = err.rfind("error: ")
    assert at >= 0 and err.rstrip().splitlines()[-1].startswith("  fix: "), err
    assert err.count("error: ") == 1, f"more than one error:\n{err}"
    return err[at:]


def well():
    out, err = Run("none", 0, 30, "--processes", 4).end(0)
    assert out == "stopped false\n" and err == "", out + err


def thrown():
    out, err = Run("throw", 2, 30, "--processes", 4).end(5)
    assert "loss nan" in last_error(err) and "who: rank 2 (pp 0, dp 2" in err, err


def thrown_json():
    out, err = Run("throw", 1, 30, "--json", "--processes", 2).end(5)
    error = json.loads(err)["error"]
    assert error["who"].startswith("rank 1 ") and error["code"] == 5 and error["fix"], err


def refused():
    out, err = Run("refuse", 1, 30, "--processes", 3).end(2)
    assert "data.train of rank 1" in last_error(err), err


def killed():
    out, err = Run("kill", 2, 30, "--processes", 4).end(4)
    assert "rank 2 was ended by signal 9" in last_error(err), err


def crashed():
    out, err = Run("segfault", 0, 30, "--processes", 2).end(4)
    assert "rank 0 was ended by signal 11" in last_error(err), err


def stopped():
    out, err = Run("stop", 3, 2, "--processes", 4).end(4)
    error = last_error(err)
    assert "has not ended within log.watchdog_seconds = 2" in error, err
    rows = [line for line in error.splitlines() if line.startswith("  rank ") and "(pp" in line]
    assert len(rows) == 4 and all("waits" in row for row in rows[:3]) and "process is stopped" in rows[3], err
    assert "all_reduce" in rows[0] and " 20 " in rows[0], err  # step and number of the operation


def hung():
    out, err = Run("hang", 1, 2, "--processes", 2).end(4)
    assert "has not ended" in last_error(err), err


def by_signal():
    for number in (signal.SIGINT, signal.SIGTERM):
        run = Run("until-signal", 0, 30, "--processes", 3)
        run.wait_for_ranks(3)
        run.process.send_signal(number)
        out, err = run.end(0)
        assert out == "stopped true\n" and err == "", out + err


def signal_to_all_processes():
    # As a service manager or batch system sends it; a step and a save take longer than mpirun's patience of a second.
    for number in (signal.SIGTERM, signal.SIGINT):
        def stop_all(folder, launcher):
            while not Path(folder, "run/ranks/rank-0003").exists():
                time.sleep(0.05)
            time.sleep(2)
            for process in (*left_over(folder), launcher.pid):
                os.kill(int(process), number)
        code, seconds, err, scratch = pretrain_with("", "train.global_batch=512", meanwhile=stop_all)
        lines = Path(scratch.name, "run/metrics.jsonl").read_text().splitlines()
        assert code == 0 and len(lines) < 6 and "error" not in err, f"exit {code} after {seconds:.0f} s\n{err}"
        assert Path(scratch.name, f"run/checkpoints/step-{len(lines):08}/COMPLETE").exists(), err


def early_signal():
    """A signal while the ranks still start reaches them once they can take it."""
    run = Run("until-signal", 0, 30, "--processes", 2)
    while not run.ranks():
        assert time.monotonic() - run.start < SLOW
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    out, err = run.end(0)
    assert out == "stopped true\n", out + err


def launcher_killed():
    run = Run("until-signal", 0, 30, "--processes", 3)
    run.wait_for_ranks(3)
    run.process.kill()
    run.end(-signal.SIGKILL)


def rank_killed_under_mpirun():
    """Without marrow's own launcher, and with mpirun slow to kill: the ranks find the dead one themselves."""
    run = Run("until-signal", 0, 30, mpirun=3, environment={"OMPI_MCA_odls_base_sigkill_timeout": "5"})
    run.wait_for_ranks(3)
    time.sleep(1)
    victim, at = run.ranks()[0], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while any(not Path(f"/proc/{rank}/status").read_text().count("Z (zombie)") for rank in run.ranks()):
        assert time.monotonic() - at < 4, "ranks outlive a dead one"
        time.sleep(0.05)
    out, err = run.process.communicate(timeout=SLOW)
    assert run.process.returncode != 0 and f"(process {victim}) is dead" in err, err


def thrown_under_mpirun():
    run = Run("throw", 1, 30, mpirun=3)
    out, err = run.process.communicate(timeout=SLOW)
    assert run.process.returncode == 5 and err.count("error: ") == 1 and "loss nan" in err, err


def without_mpi():
    """Ranks of a torchrun-like launcher meet, and then say that CPUs need MPI: once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as meeting:
        for place in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, {"MARROW_RENDEZVOUS_FILE": meeting + "/file"}):
            with tempfile.TemporaryDirectory() as folder:
                ranks = [subprocess.Popen([BINARY, "--scenario", "none", folder, "0", "30"], stderr=subprocess.PIPE, text=True,
                                          env={**ENVIRONMENT, "RANK": str(r), "WORLD_SIZE": "3",
                                               **{name: str(value) for name, value in place.items()}}) for r in range(3)]
                errors = [rank.communicate(timeout=SLOW)[1] for rank in ranks]
                assert [rank.returncode for rank in ranks] == [2, 2, 2], errors
                assert "".join(errors).count("3 processes on CPUs need MPI") == 1, errors


def missing_peer():
    # Ranks of a torchrun-like launcher, one or all of whose peers never come: named in time; signals end the wait.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.md").write_text((ROOT / "README.md").read_text())
        subprocess.run([FAULTY, "tokenize", "--tokenizer", "bytes", "--input", folder + "/text.md", "--output",
                        folder + "/corpus"], check=True, capture_output=True)
        Path(folder, "model.json").write_text((ROOT / "configs/models/qwen3-tiny.json").read_text())
        Path(folder, "run.toml").write_text(FAULTY_RUN.replace("FOLDER", folder))
        meetings = 0

        def start(place, *ranks, seconds):
            return [subprocess.Popen([FAULTY, "pretrain", folder + "/run.toml", "--set", f"log.watchdog_seconds={seconds}"],
                                     stderr=subprocess.PIPE, text=True,
                                     env={**ENVIRONMENT, **place, "RANK": str(r), "WORLD_SIZE": "4"}) for r in ranks]

        def places():
            nonlocal meetings
            meetings += 1
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, {"MARROW_RENDEZVOUS_FILE": f"{folder}/meet-{meetings}"}

        for place in places():
            at = time.monotonic()
            errors = [rank.communicate(timeout=SLOW)[1] for rank in start(place, 0, 2, seconds=6)]
            assert any("could not meet rank 1, 3 within 6 s" in error for error in errors), errors
            assert all("fix: check that all ranks were started" in error for error in errors), errors
            assert time.monotonic() - at < 30, "ranks wait on for a peer that does not come"
        alone, = start(places()[0], 1, seconds=6)
        assert "could not meet the store of rank 0 within 6 s" in alone.communicate(timeout=SLOW)[1]
        waiting = [rank for place in places() for r in (0, 1) for rank in start(place, r, seconds=600)]
        time.sleep(8)
        for rank, number in zip(waiting, (signal.SIGTERM, signal.SIGINT) * 2):
            at = time.monotonic()
            rank.send_signal(number)
            assert rank.wait(5) == -number, f"exit {rank.returncode}"


def lost_world():
    """A rank of a world without a meeting place refuses to train alone."""
    done = subprocess.run([BINARY, "--scenario", "none", "/tmp/marrow-none", "0", "30"], capture_output=True, text=True,
                          env={**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2 and "MASTER_ADDR" in done.stderr, done.stderr
    done = subprocess.run([BINARY, "--scenario", "none", "/tmp/marrow-none", "0", "30"], capture_output=True, text=True,
                          env={**ENVIRONMENT, "PMI_SIZE": "2", "PMI_RANK": "0"})
    assert done.returncode == 2 and "MPI sees 1" in done.stderr, done.stderr


def pretrain_with(fault, *settings, text=FAULTY_RUN, meanwhile=None):
    """Four ranks (dp 2, ep 2) of a small run, one of them with a fault: (exit code, seconds, standard error, folder)."""
    scratch = tempfile.TemporaryDirectory(prefix="marrow-fault-")
    folder = scratch.name
    Path(folder, "text.md").write_text((ROOT / "README.md").read_text())
    subprocess.run([FAULTY, "tokenize", "--tokenizer", "bytes", "--input", folder + "/text.md", "--output",
                    folder + "/corpus"], check=True, capture_output=True)
    model = json.loads((ROOT / "configs/models/qwen3-tiny.json").read_text())
    Path(folder, "model.json").write_text(json.dumps(model))
    Path(folder, "run.toml").write_text(text.replace("FOLDER", folder))
    start = time.monotonic()
    options = [word for setting in settings for word in ("--set", setting)]
    run = subprocess.Popen([FAULTY, "pretrain", folder + "/run.toml", "--processes", "4", *options], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, "MARROW_TEST_FAULT": fault})
    if meanwhile:
        meanwhile(folder, run)
    err = run.communicate(timeout=SLOW)[1]
    seconds = time.monotonic() - start
    deadline = time.monotonic() + 10
    while left_over(folder):
        assert time.monotonic() < deadline, f"{fault}: left over: {left_over(folder)}"
        time.sleep(0.05)
    return run.returncode, seconds, err, scratch


def fault(place, kind):
    def case():
        call = {"start": 1, "forward": 9, "exchange": 9, "optimizer": 3, "save": 1}[place]
        watchdog = 3 if kind == "stop" else 60
        code, seconds, err, _ = pretrain_with(f"{place}:{kind}:2:{call}", f"log.watchdog_seconds={watchdog}")
        error = last_error(err)
        assert code == 4 and seconds < 40, f"exit {code} after {seconds:.0f} s\n{err}"
        wanted = {"kill": "rank 2 (pp 0, dp 1, cp 0, ep 0) was ended by signal 9", "segfault": "was ended by signal 11", "stop": "rank 2", "throw": f"the fault in {place}"}[kind]
        assert wanted in error, err
        if kind == "stop":
            late = ("within 3 s: nothing came from rank 2",) if place == "start" else ("stopped", "watchdog_seconds = 3")
            assert all(text in error for text in late), err
        if kind == "throw":
            assert "who: rank 2" in error, err
    case.__name__ = f"{kind}_in_{place}"
    return case


def nan_stops_all():
    code, _, err, scratch = pretrain_with("forward:nan:1:9")
    assert code == 5 and "step 2: loss nan" in last_error(err), f"exit {code}\n{err}"


def nan_skips_on_all():
    code, _, err, scratch = pretrain_with("forward:nan:1:9", "train.skip_nonfinite=1")
    assert code == 0 and err.count("error: ") == 0, f"exit {code}\n{err}"
    lines = [json.loads(line) for line in Path(scratch.name, "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and sum(line["loss"] is None or line["loss"] != line["loss"] for line in lines) == 1, lines
    assert "skipped" in Path(scratch.name, "run/log-rank-0000.txt").read_text()


def stopped_in_init():
    # The others wait for it in MPI_Init, where no watchdog is yet.
    code, seconds, err, _ = pretrain_with("init:stop:1:1", "log.watchdog_seconds=3")
    assert code == 4 and seconds < 40, f"exit {code} after {seconds:.0f} s\n{err}"
    assert "0 of 4 ranks have started within 20 s; rank 1 (pp 0, dp 0, cp 0, ep 1) is stopped" in last_error(err), err


FAULTS = [fault(place, kind) for place in ("start", "forward", "exchange", "optimizer", "save")
          for kind in ("kill", "stop", "throw")] + [fault("forward", "segfault")]
CASES = [*FAULTS, stopped_in_init, nan_stops_all, nan_skips_on_all, well, thrown, thrown_json, refused, killed, crashed, stopped, hung, by_signal, signal_to_all_processes, early_signal, launcher_killed,
         rank_killed_under_mpirun, thrown_under_mpirun, without_mpi, missing_peer, lost_world]


def run_case(case):
    start = time.monotonic()
    try:
        case()
    except Exception as error:  # noqa: BLE001: every failure is told
        return f"FAIL {case.__name__}: {type(error).__name__} {error}"
    return f"{case.__name__}: {time.monotonic() - start:.1f} s"


def main():
    chosen = [case for case in CASES if len(sys.argv) < 2 or case.__name__ in sys.argv[1:]]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run_case, chosen))
    print("\n".join(results))
    failed = sum(result.startswith("FAIL") for result in results)
    print("PASS" if failed == 0 else f"FAIL {failed} of {len(chosen)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
