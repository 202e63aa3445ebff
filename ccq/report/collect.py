"""Finding results: any mix of folders and files, each JSON told by what it holds, not by its name.

    eval        OUT/SUITE.json of `ccq eval`                 bench       what `ccq bench` and benchmarks/ write
    analysis    what `ccq analyze` writes                    run         the folder of a run of `ccq train`
    sweep       what `ccq sweep` writes

What a result is of stands in its `identity`. What is damaged or unfinished is named, and the rest is still there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ccq.files import read_text, stored
from ccq.names import grouped
from ccq.report.table import WORDS, scale_label, trained_as
from ccq.systems import UNCHANGED, Identity

# folders that hold no results
SKIP = {"checkpoints", "tensorboard", "tokenizer", "requests", "responses", "node_modules", "__pycache__"}
PARTS = ("data.json", "provenance.json")  # of a run's folder, read with its config.json or not at all
LARGEST = 64 * 2**20  # bytes of a JSON that is opened
KINDS = ("run", "sweep", "eval", "analysis", "bench")  # in the order of their footnotes
ANALYSES = ("alignment", "gate", "intervene", "margin")
BENCHES = ("layer", "op", "decode-op", "prefill", "decode", "train", "operator-cpu", "data-prepare")
# what JSON that is not what it should be raises when it is read
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


@dataclass(eq=False)
class Source:
    """One result file, the folder of a run, or one run of a sweep's file."""

    kind: str  # of KINDS
    detail: str  # suite, kind of benchmark or analysis; "" for a run
    path: Path
    content: dict[str, Any]
    identity: Identity = field(default_factory=Identity)
    records: list[dict] = field(default_factory=list)  # of a run: its log
    # of a run: one each time that it was begun or resumed; of an evaluation in stages: where the model answered
    origins: list[dict] = field(default_factory=list)
    number: int = 0  # of its footnote
    run: Source | None = None  # of an evaluation or analysis: the run in whose folder it lies
    name: str = ""  # the path without what is this machine's, as `called` and a folder more where others are called so

    @property
    def subject(self) -> str:
        """What it is of, without the seed."""
        return ", ".join(filter(None, (self.identity.label, scale_label(self.identity.size))))

    @property
    def title(self) -> str:
        return self.subject if self.seed is None else f"{self.subject}, seed {self.seed}"

    @property
    def seed(self) -> int | None:
        return self.identity.seed

    @property
    def origin(self) -> dict[str, Any]:
        """Commit, versions, date, hardware, command, as far as they are known."""
        if self.kind in ("run", "sweep"):
            return self.origins[-1] if self.origins else {}
        return self.content.get("provenance") or self.content

    @property
    def everywhere(self) -> list[dict]:
        """Its origins, of a run that was resumed elsewhere all of them, in order."""
        return self.origins or [self.origin]

    @property
    def commit(self) -> str:
        return ", then ".join(dict.fromkeys(map(commit_of, self.everywhere)))

    @property
    def hardware(self) -> str:
        where = ", then ".join(dict.fromkeys(map(hardware_of, self.everywhere)))
        return f"metrics: {where}" if self.metrics_only else where

    @property
    def metrics_only(self) -> bool:
        """Whether an evaluation in stages says where its scores were taken, but not where the model answered."""
        return not self.origins and "--stage metrics" in self.commands

    @property
    def commands(self) -> str:
        """What was typed; of an evaluation in stages, what was asked for and how it was answered."""
        stages = self.content.get("stages") or {}
        told = [origin["command"] for origin in stages.values() if origin.get("command")]
        return ", then ".join(dict.fromkeys(told)) or str(self.origin.get("command") or "")

    @property
    def when(self) -> str:
        """Date and time: the greater the newer."""
        return str(self.origin.get("date") or "")

    @property
    def told(self) -> str:
        """One line for a hover."""
        seed = "" if self.seed is None else f"seed {self.seed}; "
        return f"{self.name}; {seed}commit {self.commit}; {self.hardware}; {self.date}"

    @property
    def date(self) -> str:
        return self.when[:10] or "unknown"

    @property
    def last_step(self) -> int:
        """How far a run is: its newest checkpoint, as for `ccq export`; its log, where no checkpoints were kept."""
        checkpoints = self.path / "checkpoints"
        if checkpoints.is_dir():
            from ccq.train.checkpoint import newest

            return newest(checkpoints) or 0
        return max((int(record["step"]) for record in self.records), default=0)

    @property
    def rate(self) -> float | None:
        """The learning rate that the model was trained with, where it is known."""
        if self.kind == "sweep":
            return float(self.content["lr"])
        run = self if self.kind == "run" else self.run
        return None if run is None else float(run.content["optimizer"]["lr"])

    def last(self, name: str) -> float | None:
        """The last value in the log of a run."""
        values = [record[name] for record in self.records if record.get(name) is not None]
        return float(values[-1]) if values else None


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
        quick = grouped((s for s in self.of("eval") if s.content.get("quick_look")),
                        lambda s: (s.detail, s.content.get("limit")))  # fmt: skip
        looks = [f"{of[0].name if len(of) == 1 else f'{suite} of {len(of)} models'} (first {limit})"
                 for (suite, limit), of in quick.items()]  # fmt: skip
        if looks:
            notes.append(f"These are quick looks, not whole suites: {', '.join(looks)}.")
        notes += self.needle_notes()
        origins = [origin for s in self.sources for origin in s.everywhere]
        commits = sorted({str(origin["commit"])[:7] for origin in origins if origin.get("commit")})
        if len(commits) > 1:
            notes.append(f"Results of {len(commits)} commits are mixed here: {', '.join(commits)}.")
        for package in ("ccq", "torch", "fla-core"):
            versions = {o["versions"].get(package) for o in origins if o.get("versions")} - {None}
            if len(versions) > 1:
                notes.append(f"Results of several versions of {package} are mixed here: {', '.join(sorted(versions))}.")
        changed = [s.name for s in self.sources if any(o.get("dirty") for o in s.everywhere)]
        if changed:
            notes.append(f"These were made with uncommitted changes: {', '.join(changed)}.")
        asked = grouped(self.of("eval"), lambda s: (s.detail, s.identity.size))  # models of one size are compared
        unlike = [suite for (suite, _), of in asked.items() if len({s.content["samples"].get("hash") for s in of}) > 1]
        for suite in dict.fromkeys(unlike):
            notes.append(f"{suite}: the models have different samples or tokenizers.")
        return notes

    def needle_notes(self) -> list[str]:
        """What scores of needles rest on: the keys that were asked for, and needle documents in the training text."""
        asked = self.of("eval", "niah")
        odd = [s for s in asked if (s.content.get("settings") or {}).get("keys") == "odd"]
        notes = []
        if odd:
            who = "" if len(odd) == len(asked) else f" by {', '.join(dict.fromkeys(s.title for s in odd))}"
            notes.append(WORDS["odd_keys"].format(who=who))
        if odd or any(s.identity.needles for s in asked):
            for share, of in grouped(asked, lambda s: s.identity.needles and round(s.identity.needles, 2)).items():
                known = "the training text has no needle documents"
                if share is None:
                    known = "the share of needle documents in the training text is not recorded"
                elif share:
                    known = f"{share:.0%} of the training tokens are needle documents; the paper mentions none"
                notes.append(f"Needles at {'; '.join(dict.fromkeys(trained_as(s.identity) for s in of))}: {known}.")
        return notes


def collect(paths: Sequence[Path]) -> Collection:
    """All results under `paths`, each once, numbered in a fixed order."""
    found = Collection()
    unique: dict[Path, Path] = {}
    for file in (file for path in paths for file in files(path)):
        unique.setdefault(file.resolve(), file)
    for file in unique.values():
        take(file, found)
    runs = found.of("run")
    for source in found.sources:
        source.run = next((run for run in runs if run.path in source.path.parents), None)
        source.name = "/".join(called(source))
    names = Counter((source.kind, source.name) for source in found.sources)
    for source in found.sources:
        if names[source.kind, "/".join(called(source))] > 1:
            source.name = "/".join(called(source, 1)).strip("/")
    found.sources.sort(key=lambda s: (KINDS.index(s.kind), s.detail, s.name, str(s.path)))
    for number, source in enumerate(found.sources, 1):
        source.number = number
    return found


def called(source: Source, more: int = 0) -> tuple[str, ...]:
    """A folder and a file at most, and of a run's results the run; with so many folders `more`."""
    file = source.path / "config.json" if source.kind == "run" else source.path
    if source.run is not None:
        parts = len(file.relative_to(source.run.path.parent).parts)
    else:
        parts = 3 if file.parent.name in ("eval", "analysis") else 2
    return file.parts[-parts - more :]


def files(path: Path) -> Iterator[Path]:
    """JSON files, and the answers of evaluations that have no result yet."""
    if path.is_file():
        yield path
        return
    for below in sorted(path.iterdir()):
        if below.is_dir() and below.name == "responses":
            yield from sorted(below.glob("*.jsonl"))
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
            found.problems.append(f"{short} is left out: it is larger than {LARGEST / 2**20:g} MiB, as no result is.")
            return
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        found.problems.append(f"{short} is damaged and left out: {str(error).splitlines()[0]}.")
        return
    try:
        source = recognise(file, content, found)
        if source is None:
            found.ignored.append(short)
        elif not changed(source):
            found.sources.append(source)
    except DAMAGE as error:
        found.problems.append(f"{short} is incomplete and left out: {type(error).__name__} {error}.")


def changed(source: Source) -> bool:
    """Whether it is an evaluation that `ccq analyze intervene` made: its table tells it."""
    unchanged = UNCHANGED in source.identity.variant.split(", ")
    return source.kind == "eval" and (unchanged or bool(source.content["model"].get("lam")))


def recognise(file: Path, content: Any, found: Collection) -> Source | None:
    """A source, or None for a JSON that is nothing we know. KeyError and the like for one that is damaged."""
    if not isinstance(content, dict):
        return None
    if {"suite", "scores", "samples"} <= content.keys():
        if not isinstance(content["suite"], str):
            raise TypeError(f"suite: expected a name, got {content['suite']!r}")
        stages = content.get("stages") or {}
        origins = [stages["score"]] if "score" in stages else []
        return Source("eval", content["suite"], file, content, Identity(**content["identity"]), origins=origins)
    if content.get("kind") in ANALYSES:
        return Source("analysis", content["kind"], file, content, Identity(**content["identity"]))
    if content.get("kind") in ("mqar_sweep", "mad_sweep"):
        if missing := len(content["missing"]):
            found.unfinished.append(f"{file.name}: {missing} run{' is' if missing == 1 else 's are'} missing.")
        return Source("sweep", content["kind"].removesuffix("_sweep"), file, content, origins=[content["provenance"]])
    if {"model", "data", "optimizer", "steps"} <= content.keys():
        return run_of(file.parent, content, found)
    if content.get("bench") in BENCHES:
        return Source("bench", content["bench"], file, content)
    return None


def run_of(folder: Path, config: dict, found: Collection) -> Source:
    source = Source("run", "", folder, config, Identity(**config["identity"]))
    told = folder / "provenance.json"
    try:
        source.origins = list(map(dict, json.loads(told.read_text()))) if told.exists() else []
    except (ValueError, TypeError) as error:
        found.problems.append(f"{folder.name}/provenance.json is damaged and left out: {str(error).splitlines()[0]}.")
    log = folder / "log.jsonl"
    lines = read_text(log, "replace").splitlines() if stored(log) else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            int(record["step"])
            source.records.append(record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if number < len(lines):  # the last line may be cut by the death of its process
                found.problems.append(f"{folder.name}/log.jsonl: line {number} is damaged and left out.")
    steps = int(config["steps"])
    if source.last_step < steps:
        found.unfinished.append(f"{folder.name} is not finished: step {source.last_step:,} of {steps:,}.")
    return source
