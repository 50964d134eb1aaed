"""Reads the event files that test_train wrote with the tensorboard package; exits 1 on a mismatch."""
import glob
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c


def check_frames(path):
    """Every TFRecord frame's checksums; the reader of the package skips them."""
    data = open(path, "rb").read()
    at = 0
    while at < len(data):
        (length, length_crc) = struct.unpack_from("<QI", data, at)
        assert length_crc == masked_crc32c(data[at : at + 8]), (path, at)
        event = data[at + 12 : at + 12 + length]
        (crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert crc == masked_crc32c(event), (path, at)
        at += 16 + length


def main(folder):
    files = sorted(glob.glob(folder + "/events.out.tfevents.*"))
    assert len(files) == 2, files
    for path in files:
        check_frames(path)
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/lr"}, events.Tags()
    loss = {e.step: e.value for e in events.Scalars("train/loss")}
    expected = {s: 10.0 / s for s in range(1, 201)} | {s: -float(s) for s in range(201, 251)}
    assert loss.keys() == expected.keys(), sorted(loss.keys() ^ expected.keys())
    for step, value in expected.items():
        assert abs(loss[step] - value) <= 1e-6 * abs(value), (step, loss[step], value)
    assert all(e.wall_time > 1.6e9 for e in events.Scalars("train/lr"))


main(sys.argv[1])
