"""Damage the files of a results folder, one at a time, and look at what is made of it.

Whatever was done to a file, reading the folder gives the same numbers as before or one sentence; never another number,
and never an error that nobody expected.

    python -m tests.fuzz.results [--count 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from sgdol.paper.claims import CHECKS, check_claims
from sgdol.paper.configuration import ResultsError
from sgdol.paper.measures import Reader
from sgdol.paper.results import Results

COUNT = 300
# Those that look at the curves and take no time.
LOOKS = [check for check in CHECKS if check.kind == "finding" and check.id != "smoothness-1002"]


def outcome(folder: Path) -> str:
    """All the numbers of a folder, as text."""
    results = Results(folder)
    read = Reader(results)
    searches = {str(key): results.tuning(*key).to_dict() for key in results.tuned()}
    found = {
        "configuration": vars(results.configuration),
        "runs": results.available(),
        "summary": results.summary(),
        "searches": searches,
        "claims": [claim.record() for claim in check_claims(read, LOOKS)],
    }
    results.timings()  # not a number of the results, but it must not fail with anything but a sentence
    return json.dumps(found, default=str, sort_keys=True)


def flip(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """One bit."""
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def scribble(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """Some bytes in a row."""
    start = rng.randrange(len(content))
    length = min(rng.randrange(1, 64), len(content) - start)
    content[start : start + length] = rng.randbytes(length)
    return bytes(content)


def zeros(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """A block of zeros, as a disk leaves it."""
    start = rng.randrange(len(content))
    length = min(512, len(content) - start)
    content[start : start + length] = bytes(length)
    return bytes(content)


def cut(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """The end is missing."""
    return bytes(content[: rng.randrange(len(content))])


def append(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """Something behind the end."""
    return bytes(content) + rng.randbytes(rng.randrange(1, 200))


def swap(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """Two bytes change places."""
    one, other = (rng.randrange(len(content)) for _ in range(2))
    content[one], content[other] = content[other], content[one]
    return bytes(content)


def exchange(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """The content of another file."""
    return rng.choice(files).read_bytes()


def digit(content: bytearray, rng: random.Random, files: list[Path]) -> bytes:
    """Another digit, which leaves text well formed."""
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if places:
        content[rng.choice(places)] = rng.randrange(48, 58)
    return bytes(content)


DAMAGES: list[Callable[[bytearray, random.Random, list[Path]], bytes]]
DAMAGES = [flip, scribble, zeros, cut, append, swap, exchange, digit]


def damage_and_read(folder: Path, count: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Damage a whole folder ``count`` times: how often what happened, and what should not have."""
    before = outcome(folder)
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".nc", ".json") and p.name != "claims.json")
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    wrong = []
    texts = [path for path in files if path.suffix == ".json"]
    for number in range(count):
        path = rng.choice(texts if number % 4 == 0 else files)  # there are few files of text
        damage = rng.choice(DAMAGES)
        original = path.read_bytes()
        path.write_bytes(damage(bytearray(original), rng, files))
        case = f"case {number}: {damage.__name__} {path.relative_to(folder)}"
        try:
            same = path.read_bytes() == original or outcome(folder) == before
            tally["the same numbers" if same else "other numbers"] += 1
            if not same:
                wrong.append(f"{case}: other numbers")
        except ResultsError as error:
            tally["a sentence"] += 1
            if "\n" in str(error) or str(path) not in str(error):
                wrong.append(f"{case}: not one sentence that names the file: {error}")
        except Exception as error:
            tally["another error"] += 1
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        finally:
            path.write_bytes(original)
    return tally, wrong


def main() -> None:
    """Damage files and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="how many damages (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: %(default)s)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "paper"))
    from written import write_folder

    folder = Path(tempfile.mkdtemp(prefix="sgdol-fuzz-"))
    try:
        write_folder(folder)
        tally, wrong = damage_and_read(folder, arguments.count, arguments.seed)
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.count} damaged files: {', '.join(f'{n} {what}' for what, n in tally.most_common())}")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
