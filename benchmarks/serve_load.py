"""`ccq serve` under load: clients that ask at once, and what becomes of its memory.

    python benchmarks/serve_load.py                         # minutes on two cores; writes study/serve_load.json
    python benchmarks/serve_load.py --device cuda --out X   # elsewhere

A server of its own is started for each row, on the loopback address. A round is so many clients at once, each of which
asks for 32 tokens after a prompt of its own, half of them streamed. The first round warms up; then two are measured,
and after them one in which every fifth client goes away and every fifth asks nonsense. `batch` 1 is what transformers'
server does by itself: one request after the other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ccq.files import write_json
from ccq.provenance import provenance

TOKENS, ROUNDS = 32, 2


def ask(port: int, i: int, kind: str = "plain") -> tuple[float, int, int]:
    """Seconds, status and tokens of one request."""
    body: dict = {"prompt": f"{i}. " + "It was the best of times, it was the worst of times, " * (1 + i % 5)}
    body |= {"max_tokens": TOKENS, "stream": i % 2 == 0} if kind != "nonsense" else {"max_tokens": "many"}
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if kind == "gone":
        time.sleep(0.2)
        connection.close()
        return time.perf_counter() - begin, 0, 0
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        return time.perf_counter() - begin, answer.status, 0
    last = text.strip().split("\n\n")[-2].removeprefix("data: ") if body["stream"] else text
    return time.perf_counter() - begin, 200, json.loads(last)["usage"]["completion_tokens"]


def at_once(port: int, clients: int, kinds: tuple[str, ...] = ("plain",)) -> tuple[float, list[tuple[float, int, int]]]:
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda i: ask(port, i, kinds[i % len(kinds)]), range(clients)))
    return time.perf_counter() - begin, found


def measure(model: str, device: str, batch: int, clients: int) -> dict:
    command = [sys.executable, "-m", "ccq", "serve", model, "--port", "0", "--device", device, "--batch", str(batch)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CCQ_API_KEY": "", "OMP_NUM_THREADS": "1"}
    )
    try:
        assert server.stdout is not None
        port = int(re.findall(r":(\d+)/v1", server.stdout.readline())[0])
        process = psutil.Process(server.pid)
        at_once(port, clients)
        before = process.memory_info().rss
        rounds = [at_once(port, clients) for _ in range(ROUNDS)]
        after = process.memory_info().rss
        _, mixed = at_once(port, clients, ("plain", "gone", "plain", "nonsense", "plain"))
        time.sleep(2)
        at_last = process.memory_info().rss
    finally:
        server.terminate()
        server.wait(30)
    seconds = sorted(s for _, found in rounds for s, _, _ in found)
    latency = {"median": statistics.median(seconds), "p95": seconds[int(0.95 * len(seconds))], "max": seconds[-1]}
    row = {
        "batch": batch, "clients": clients, "asked": clients * ROUNDS,
        "answered": sum(status == 200 for _, found in rounds for _, status, _ in found),
        "tokens_per_s": sum(n for _, found in rounds for *_, n in found) / sum(s for s, _ in rounds),
        "latency_s": latency,
        "rss_mib": {"before": before / 2**20, "after": after / 2**20, "after_mixed": at_last / 2**20},
        "mixed": {str(status): sum(s == status for _, s, _ in mixed) for status in (0, 200, 400)},
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="ccq-gla-pico")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "study" / "serve_load.json")
    args = parser.parse_args()
    origin = {**provenance("python benchmarks/serve_load.py"), "cores": os.cpu_count(), "model": args.model}
    origin["load_before"] = round(os.getloadavg()[0], 2)
    cases = ((1, 1), (1, 50), (16, 50))
    rows = [measure(args.model, args.device, batch, clients) for batch, clients in cases]
    write_json(args.out, {**origin, "device": args.device, "tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
