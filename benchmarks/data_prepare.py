"""How fast `ccq data prepare` is beside bare `encode_batch` on the same cores, and whether its memory stays flat.

    python benchmarks/data_prepare.py TEXT...    # files or folders; half an hour; writes results/data_prepare.json
    python benchmarks/data_prepare.py --quick    # a minute, invented text, writes nothing: does the script work?

The texts are repeated until there are 100 MB and 1 GB of them, as .jsonl.zst, and prepared with a 32K tokenizer learned
from them. What is compared, all in MB of UTF-8 text a second:
    bare       one process that has its texts in memory and calls `Tokenizer.encode_batch` (all cores), nothing else
    prepare    reading, unpacking, encoding in processes, writing and hashing shards, from the call to its return
A machine may have other work, so the two take turns: each prepare is compared with the bare runs before and after it,
first in rounds of 30 MB, of which the median counts, then 100 MB and 1 GB. Ratios of CPU seconds stand beside those of
wall clock. Memory is the proportional set size of the process and its workers, sampled.
Only the ratios are meant for publication.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ccq.bench.results import SHIPPED
from ccq.data.sources import Inputs
from ccq.files import write_json
from ccq.provenance import provenance

BATCH = 256  # documents that bare encode_batch gets at once; more or fewer make it no faster


def invented(count: int) -> Iterator[str]:
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlucm", k=generator.randint(1, 10))) for _ in range(20_000)]
    for _ in range(count):
        yield " ".join(generator.choices(words, k=generator.randint(50, 2000))) + "."


def repeated(texts: list[str], size: int) -> Iterator[str]:
    """The texts over and over, `size` bytes of them."""
    while True:
        for text in texts:
            yield text
            size -= len(text.encode())
            if size <= 0:
                return


def write_corpus(path: Path, texts: list[str], size: int) -> None:
    import zstandard

    with open(path, "wb") as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw) as packed:
        for number, text in enumerate(repeated(texts, size)):
            packed.write(json.dumps({"id": str(number), "text": text}).encode() + b"\n")


def cpu_seconds() -> float:
    """Of this process and of those it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [pid] + [p for child in children.read_text().split() for p in tree(int(child))]
    except OSError:
        return []


def memory(pid: int) -> int:
    """Bytes of a process and its children, each page counted once."""
    total = 0
    for process in tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return total


def measure_bare(corpus: Path, tokenizer: Path, size: int) -> dict:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts, read = [], 0
    for piece in Inputs((corpus,)).pieces():
        texts.append(piece.text)
        read += len(piece.text.encode())
        if read >= size:
            break
    encoder.encode_batch(texts[:BATCH])
    begin, cpu = time.perf_counter(), cpu_seconds()
    for at in range(0, len(texts), BATCH):
        encoder.encode_batch(texts[at : at + BATCH])
    return {"text_bytes": read, "wall_s": time.perf_counter() - begin, "cpu_s": cpu_seconds() - cpu}


def measure_prepare(corpus: Path, tokenizer: Path) -> dict:
    from ccq.data.prepare import Preparation, prepare
    from ccq.data.tokenizer import load_tokenizer

    load_tokenizer(tokenizer)  # imports are not what is measured
    before = memory(os.getpid())
    peak, over = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.5):  # reading it costs milliseconds of CPU
            peak = max(peak, memory(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), cpu_seconds()
    with tempfile.TemporaryDirectory(dir=corpus.parent) as out:
        index = prepare(Preparation(Inputs((corpus,)), tokenizer), out)
        wall, used = time.perf_counter() - begin, cpu_seconds() - cpu
    over.set()
    watcher.join()
    sizes = {"text_bytes": index["text_bytes"], "tokens": index["tokens"]}
    return {**sizes, "wall_s": wall, "cpu_s": used, "peak_bytes": peak, "bytes_before": before}


def in_own_process(what: str, corpus: Path, tokenizer: Path, size: int = 0) -> dict:
    command = [sys.executable, __file__, "--measure", what, str(corpus), str(tokenizer), str(size)]
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    row = {"what": what, **json.loads(done.stdout.splitlines()[-1])}
    speed, efficiency = (row["text_bytes"] / 1e6 / row[name] for name in ("wall_s", "cpu_s"))
    peak = f", peak {row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else ""
    print(
        f"  {what:<8} {row['text_bytes'] / 1e6:7.1f} MB  {speed:6.2f} MB/s  {efficiency:6.2f} MB/CPU-s{peak}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="files or folders of text")
    parser.add_argument("--quick", action="store_true", help="little invented text, nothing written")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # how the script calls itself
    args = parser.parse_args()
    if args.measure:
        what, corpus, tokenizer, size = args.measure
        pair = Path(corpus), Path(tokenizer)
        print(json.dumps(measure_bare(*pair, int(size)) if what == "bare" else measure_prepare(*pair)))
        return
    if bool(args.texts) == args.quick:
        parser.error("expected texts, or --quick")

    from ccq.data.tokenizer import train_tokenizer

    part, small, large = (10**6, 2 * 10**6, 4 * 10**6) if args.quick else (3 * 10**7, 10**8, 10**9)
    rounds = 1 if args.quick else 5
    command = "python benchmarks/data_prepare.py " + " ".join("TEXT" for _ in args.texts[:1])
    origin = {**provenance(command.strip()), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}
    if origin["load_before"] > 0.5:
        print(f"The machine is busy (load {origin['load_before']}): wall clock will say little.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = list(invented(2000)) if args.quick else [p.text for p in Inputs(tuple(args.texts)).pieces()]
        random.Random(0).shuffle(texts)  # files of one kind each: mix them
        for size in (part, small, large):
            write_corpus(folder / f"{size}.jsonl.zst", texts, size)
        sample = Inputs((folder / f"{small}.jsonl.zst",))
        train_tokenizer(sample, 2000 if args.quick else 32_000, sample=2 * 10**7).save_pretrained(folder / "tokenizer")
        rows = []
        for size in [part] * rounds + [small, large]:
            rows.append(in_own_process("bare", folder / f"{large}.jsonl.zst", folder / "tokenizer", part // 2))
            rows.append(in_own_process("prepare", folder / f"{size}.jsonl.zst", folder / "tokenizer"))
        rows.append(in_own_process("bare", folder / f"{large}.jsonl.zst", folder / "tokenizer", part // 2))

    hundred, thousand = rows[-4], rows[-2]
    goals = []

    def goal(name: str, value: float, at_least: float | None = None, at_most: float | None = None) -> None:
        ok = value >= at_least if at_least is not None else value <= (at_most or 0)
        goals.append({"name": name, "value": value, "at_least": at_least, "at_most": at_most, "ok": ok})

    def over_bare(at: int, kind: str) -> float:
        """Throughput of the prepare in rows[at] over that of its neighbours."""
        near = rows[at - 1], rows[at + 1]
        bare = sum(row["text_bytes"] for row in near) / sum(row[kind] for row in near)
        return rows[at]["text_bytes"] / rows[at][kind] / bare

    for kind, label in (("wall_s", "wall clock"), ("cpu_s", "CPU time")):
        ratios = [over_bare(2 * n + 1, kind) for n in range(rounds)]
        goal(f"throughput over bare encode_batch, {label}, median", statistics.median(ratios), at_least=0.8)
        goal(f"the same for 1 GB, {label}", over_bare(len(rows) - 2, kind), at_least=0.8)
    goal("peak memory, 1 GB over 100 MB", thousand["peak_bytes"] / hundred["peak_bytes"], at_most=1.2)
    growth = [row["peak_bytes"] - row["bytes_before"] for row in (hundred, thousand)]
    goal("the same without what was there before", growth[1] / max(growth[0], 1), at_most=1.2)
    print("Goals")
    for g in goals:
        bound = f">= {g['at_least']:g}" if g["at_least"] is not None else f"<= {g['at_most']:g}"
        print(f"  {g['name']:<60} {g['value']:8.3g}   {bound:<8} {'ok' if g['ok'] else 'missed'}")
    if args.quick:
        print("Quick: so little text says nothing of the goals. Nothing written.")
        return
    write_json(SHIPPED / "data_prepare.json", {"bench": "data-prepare", **origin, "goals": goals, "measurements": rows})


if __name__ == "__main__":
    main()
