"""Finding results: any mix of folders and files, each JSON told by what it holds, not by its name.

    eval        OUT/SUITE.json of `ccq eval`                 bench       what `ccq bench` and benchmarks/ write
    analysis    what `ccq analyze` writes                    run         the folder of a run of `ccq train`
    sweep       what `ccq sweep` writes

What is damaged or unfinished is named, and the rest is still there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ccq.report.systems import LABELS, System, from_config, from_name, scale_label

# folders that hold no results
SKIP = {"checkpoints", "tensorboard", "tokenizer", "requests", "responses", "samples", "node_modules", "__pycache__"}
PARTS = ("data.json", "provenance.json")  # of a run's folder, read with its config.json or not at all
LARGEST = 64 * 2**20  # bytes of a JSON that is opened
ANALYSES = ("alignment", "gate", "intervene", "margin")
# kind of benchmark: what its rows have
BENCHES = {
    "layer": {"backbone", "variant", "pass", "graph_ms"},
    "op": {"name", "pass", "floor_ms"},
    "decode-op": {"backbone", "variant", "byte_per_s"},
    "prefill": {"system", "wall_ms", "T"},
    "decode": {"system", "step_ms", "generate_tok_s"},
    "train": {"system", "tokens_per_second", "peak_gib"},
    "eval": {"system", "suite", "samples_per_second"},
}


@dataclass
class Source:
    """One result file, or the folder of a run."""

    kind: str  # eval, run, sweep, bench, analysis
    detail: str  # suite, kind of benchmark or analysis; "" for a run
    path: Path
    content: dict[str, Any]
    system: System | None = None
    seed: int | None = None
    records: list[dict] = field(default_factory=list)  # of a run: its log
    origins: list[dict] = field(default_factory=list)  # of a run: one each time that it was begun or went on
    number: int = 0  # of its footnote

    @property
    def name(self) -> str:
        """The path without what is this machine's: a folder and a file at most, and of a run's results the run."""
        path = self.path if self.kind != "run" else self.path / "config.json"
        return "/".join(path.parts[-3 if path.parent.name in ("eval", "analysis") else -2 :])

    @property
    def title(self) -> str:
        """What an evaluation or analysis is of: the system with size and seed, or the name that the model has."""
        if self.system is None or self.system.name not in LABELS:
            return self.content["model"]["name"]
        seed = None if self.seed is None else f"seed {self.seed}"
        return ", ".join(filter(None, (self.system.label, scale_label(self.system.size), seed)))

    @property
    def origin(self) -> dict[str, Any]:
        """Commit, versions, date, hardware, command, as far as they are known."""
        if self.kind == "run":
            return self.origins[-1] if self.origins else {}
        return self.content.get("provenance") or self.content

    @property
    def commit(self) -> str:
        return then(commit_of(origin) for origin in self.origins or [self.origin])

    @property
    def hardware(self) -> str:
        return then(hardware_of(origin) for origin in self.origins or [self.origin])

    @property
    def date(self) -> str:
        return str(self.origin.get("date") or "unknown")[:10]

    @property
    def told(self) -> str:
        """One line for a hover."""
        parts = [self.name, f"commit {self.commit}", self.hardware, self.date]
        if self.seed is not None:
            parts.insert(1, f"seed {self.seed}")
        return "; ".join(parts)

    @property
    def last_step(self) -> int:
        return max((int(record["step"]) for record in self.records), default=0)


def then(parts: Iterable[str]) -> str:
    """Of a run that went on elsewhere all of them, in order."""
    return ", then ".join(dict.fromkeys(parts))


def commit_of(origin: dict[str, Any]) -> str:
    commit = origin.get("commit")
    return f"{commit[:7]}{', with changes' if origin.get('dirty') else ''}" if commit else "unknown"


def hardware_of(origin: dict[str, Any]) -> str:
    count = f"{origin['processes']} x " if origin.get("processes", 1) > 1 else ""
    if origin.get("gpu"):
        return f"{count}{origin['gpu']}"
    if origin.get("cpu"):
        return f"{origin['cpu']}, {origin.get('cores', '?')} cores"
    return "CPU" if origin.get("versions") else "unknown"


@dataclass
class Collection:
    sources: list[Source] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # damaged
    unfinished: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # JSON that is nothing we know
    told: list[str] = field(default_factory=list)  # by whoever asks for the page

    def of(self, kind: str, detail: str | None = None) -> list[Source]:
        return [s for s in self.sources if s.kind == kind and (detail is None or s.detail == detail)]

    def notices(self) -> list[str]:
        """What a reader must know before comparing: damage, unfinished runs, mixed versions, quick looks."""
        notes = [*self.told, *self.problems, *self.unfinished]
        quick = [s for s in self.of("eval") if s.content.get("quick_look")]
        if quick:
            kinds: dict[tuple, list[str]] = {}
            for s in quick:
                kinds.setdefault((s.detail, s.content.get("limit")), []).append(s.name)
            told = [
                f"{names[0] if len(names) == 1 else f'{suite} of {len(names)} models'} (first {limit})"
                for (suite, limit), names in kinds.items()
            ]
            notes.append(f"Quick looks, not whole suites: {', '.join(told)}.")
        origins = [origin for s in self.sources for origin in s.origins or [s.origin]]
        commits = sorted({str(origin["commit"])[:7] for origin in origins if origin.get("commit")})
        if len(commits) > 1:
            notes.append(f"Results of {len(commits)} commits are mixed here: {', '.join(commits)}.")
        for package in ("ccq", "torch", "fla-core"):
            versions = {o["versions"].get(package) for o in origins if o.get("versions")} - {None}
            if len(versions) > 1:
                notes.append(f"Results of several versions of {package} are mixed here: {', '.join(sorted(versions))}.")
        changed = [s.name for s in self.sources if any(o.get("dirty") for o in s.origins or [s.origin])]
        if changed:
            notes.append(f"Made from a working tree with changes that are not committed: {', '.join(changed)}.")
        asked: dict[tuple[str, str], set] = {}  # models of one size are compared
        for s in self.of("eval"):
            asked.setdefault((s.detail, s.system.size if s.system else ""), set()).add(s.content["samples"].get("hash"))
        for suite in dict.fromkeys(suite for (suite, _), hashes in asked.items() if len(hashes) > 1):
            notes.append(f"{suite}: not all models were asked the same samples, or their tokenizers differ.")
        return notes


def collect(paths: Sequence[Path]) -> Collection:
    """All results under `paths`, each once, numbered in a fixed order."""
    found = Collection()
    seen: set[Path] = set()
    for path in paths:
        for file in files(path):
            if (real := file.resolve()) not in seen:
                seen.add(real)
                take(file, found)
    identify(found)
    found.sources.sort(
        key=lambda s: (("run", "sweep", "eval", "analysis", "bench").index(s.kind), s.detail, s.name, str(s.path))
    )
    for number, source in enumerate(found.sources, 1):
        source.number = number
    return found


def files(path: Path) -> Iterator[Path]:
    """JSON files, and the answers of evaluations that have no result yet."""
    if path.is_file():
        yield path
        return
    for below in sorted(path.iterdir()):
        if below.is_dir() and below.name == "responses":
            yield from (answers for answers in sorted(below.glob("*.jsonl")))
        elif below.is_dir() and below.name not in SKIP and not below.name.startswith("."):
            yield from files(below)
        elif below.is_file() and below.suffix == ".json":
            yield below


def take(file: Path, found: Collection) -> None:
    short = "/".join(file.parts[-2:])
    if file.name in PARTS and file.with_name("config.json").exists():
        return
    if file.suffix == ".jsonl" and file.parent.name == "responses":
        if not file.parent.parent.joinpath(f"{file.stem}.json").exists():
            answers = file.read_bytes().count(b"\n")
            out = file.parent.parent.name
            found.unfinished.append(f"{file.stem} of {out} is not finished: {max(0, answers - 1)} answers, no scores.")
        return
    try:
        if file.stat().st_size > LARGEST:
            found.ignored.append(short)
            return
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        found.problems.append(f"{short} is damaged and left out: {str(error).splitlines()[0]}.")
        return
    try:
        source = recognise(file, content, found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        found.problems.append(f"{short} lacks what it should have and is left out: {type(error).__name__} {error}.")
        return
    if source is None:
        found.ignored.append(short)
    else:
        found.sources.append(source)


def recognise(file: Path, content: Any, found: Collection) -> Source | None:
    """A source, or None for a JSON that is nothing we know. KeyError and the like for one that is damaged."""
    if not isinstance(content, dict):
        return None
    if {"suite", "scores", "samples"} <= content.keys():
        for score in content["scores"].values():
            if score["value"] is not None:
                float(score["value"])
        check(content)
        content["samples"].get("hash")
        if not content.get("finished", True):
            found.unfinished.append(f"{content['suite']} of {file.parent.name} is not finished.")
        return Source("eval", content["suite"], file, content)
    if content.get("kind") in ANALYSES:
        check(content)
        return Source("analysis", content["kind"], file, content)
    if content.get("kind") == "mqar_sweep":
        check(content, model=False)
        if missing := len(content["missing"]):
            found.unfinished.append(f"{file.name}: {missing} run{' is' if missing == 1 else 's are'} missing.")
        return Source("sweep", "mqar", file, content)
    if {"model", "data", "optimizer", "steps"} <= content.keys():
        return run_of(file.parent, content, found)
    if isinstance(content.get("rows"), list) and "versions" in content:
        for kind, keys in BENCHES.items():
            if content["rows"] and all(keys <= row.keys() for row in content["rows"]):
                check(content, model=False)
                return Source("bench", kind, file, content)
        return None
    for kind, key in (("operator-cpu", "timings"), ("data-prepare", "measurements")):
        if {key, "goals", "versions"} <= content.keys():
            check(content, model=False)
            return Source("bench", kind, file, content)
    return None


def check(content: dict, model: bool = True) -> None:
    """TypeError where what all results have is something else."""
    origin = content.get("provenance") or content
    for name, kind in (
        ("commit", str),
        ("date", str),
        ("gpu", str),
        ("cpu", str),
        ("command", str),
        ("versions", dict),
    ):
        if not isinstance(origin.get(name), kind | None):
            raise TypeError(f"{name}: expected {kind.__name__}, got {origin[name]!r}")
    if model and not isinstance(content["model"]["name"], str):
        raise TypeError(f"model: name: expected a name, got {content['model']['name']!r}")


def run_of(folder: Path, config: dict, found: Collection) -> Source:
    source = Source("run", "", folder, config)
    source.system, source.seed = from_config(config, folder.name)
    told = folder / "provenance.json"
    try:
        source.origins = json.loads(told.read_text()) if told.exists() else []
        for origin in source.origins:
            check({"provenance": origin}, model=False)
    except (ValueError, TypeError, AttributeError) as error:
        source.origins = []
        found.problems.append(f"{folder.name}/provenance.json is damaged and left out: {str(error).splitlines()[0]}.")
    log = folder / "log.jsonl"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            int(record["step"])
            source.records.append(record)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line may be cut by the death of its process
                found.problems.append(f"{folder.name}/log.jsonl: line {number} is damaged and left out.")
    steps = int(config["steps"])
    if source.last_step < steps:
        found.unfinished.append(f"{folder.name} is not finished: step {source.last_step:,} of {steps:,}.")
    return source


def longest(runs: list[Source]) -> list[Source]:
    """Of each system the longest runs: shorter ones are those of a sweep over learning rates."""
    most: dict[System | None, int] = {}
    for run in runs:
        most[run.system] = max(most.get(run.system, 0), int(run.content["steps"]))
    return [run for run in runs if int(run.content["steps"]) == most[run.system]]


def tell_data_apart(runs: list[Source]) -> None:
    """Runs of one size on other text than most of them are no runs of the same row: they say which."""
    sets: dict[str, Counter[str]] = {}
    for run in runs:
        if run.system is not None and run.content["data"].get("path"):
            sets.setdefault(run.system.size, Counter())[Path(run.content["data"]["path"]).name] += 1
    for run in runs:
        if run.system is None or not run.content["data"].get("path"):
            continue
        name, usual = Path(run.content["data"]["path"]).name, sets[run.system.size].most_common(1)[0][0]
        if name != usual:
            run.system = replace(run.system, variant=", ".join(filter(None, (run.system.variant, f"text {name}"))))


def identify(found: Collection) -> None:
    """Say of every evaluation and analysis what it is of: the run it lies in or is named after, else its names."""
    runs = found.of("run")
    tell_data_apart(runs)
    for source in found.sources:
        if source.kind not in ("eval", "analysis"):
            continue
        name, _, change = source.content["model"]["name"].partition(", lam ")  # as `ccq analyze intervene` calls it
        inside = [run for run in runs if run.path in source.path.parents]
        named = [run for run in runs if run.path.name in (name, source.path.parent.name)]
        run = next(iter([*inside, *named]), None)
        if run is not None:
            source.system, source.seed = run.system, run.seed
        else:
            told = [from_name(name), from_name(source.path.parent.name)]
            source.system = next((system for system, _ in told if system.name in LABELS), System(name))
            source.seed = next((seed for _, seed in told if seed is not None), None)
        if change:
            assert source.system is not None
            changed = f"lam {change} at inference"
            variant = f"{source.system.variant}, {changed}" if source.system.variant else changed
            source.system = replace(source.system, variant=variant)
    # what an intervention that changes nothing gives is what the model gives
    found.sources = [s for s in found.sources if not (s.kind == "eval" and "lam none at" in str(s.system))]
