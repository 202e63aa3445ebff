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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ccq.files import read_text, stored
from ccq.report.systems import System, scale_label
from ccq.systems import UNCHANGED, WITH_CONVOLUTION, Identity
from ccq.train import RunError

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


@dataclass(eq=False)
class Source:
    """One result file, or the folder of a run."""

    kind: str  # eval, run, sweep, bench, analysis
    detail: str  # suite, kind of benchmark or analysis; "" for a run
    path: Path
    content: dict[str, Any]
    identity: Identity | None = None  # None: an older version made it, or it is of no one model
    system: System | None = None
    seed: int | None = None
    records: list[dict] = field(default_factory=list)  # of a run: its log
    # of a run: one each time that it was begun or went on; of an evaluation in stages: where the model answered
    origins: list[dict] = field(default_factory=list)
    number: int = 0  # of its footnote
    tokens: int | None = None  # that the model was trained on, where known; samples, of a run on recall
    run: Source | None = None  # of an evaluation or analysis: the run that trained its model
    within: str = ""  # the folder that tells it from another source of the same name

    @property
    def name(self) -> str:
        """The path without what is this machine's: a folder and a file at most, and of a run's results the run."""
        return "/".join(filter(None, (self.within, *self.named.parts)))

    @property
    def named(self) -> Path:
        path = self.path if self.kind != "run" else self.path / "config.json"
        if self.run is not None and path.is_relative_to(self.run.path):
            return path.relative_to(self.run.path.parent)
        return Path(*path.parts[-3 if path.parent.name in ("eval", "analysis") else -2 :])

    @property
    def title(self) -> str:
        """What an evaluation or analysis is of: the system with size and seed, or the name that the model has."""
        named = self.system is not None and self.system.known and self.seed is not None
        return f"{self.subject}, seed {self.seed}" if named else self.subject

    @property
    def subject(self) -> str:
        """The same without the seed."""
        if self.system is None or not self.system.known:
            return self.content["model"]["name"]
        return ", ".join(filter(None, (self.system.label, scale_label(self.system.size))))

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
        where = then(hardware_of(origin) for origin in self.origins or [self.origin])
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
    def date(self) -> str:
        return str(self.origin.get("date") or "unknown")[:10]

    @property
    def when(self) -> str:
        """Date and time: the greater the newer."""
        return str(self.origin.get("date") or "")

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
        scored = self.evaluated()
        quick = [s for s in scored if s.content.get("quick_look")]
        if quick:
            kinds: dict[tuple, list[str]] = {}
            for s in quick:
                kinds.setdefault((s.detail, s.content.get("limit")), []).append(s.name)
            told = [
                f"{names[0] if len(names) == 1 else f'{suite} of {len(names)} models'} (first {limit})"
                for (suite, limit), names in kinds.items()
            ]
            notes.append(f"Quick looks, not whole suites: {', '.join(told)}.")
        nameless = [s.name for s in self.sources if s.identity is None and s.kind in ("eval", "analysis")]
        if nameless:
            notes.append(
                f"Made by an older version, without an identity, and so compared with nothing: {', '.join(nameless)}."
            )
        notes += self.needle_notes()
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
        for s in scored:
            asked.setdefault((s.detail, s.system.size if s.system else ""), set()).add(s.content["samples"].get("hash"))
        for suite in dict.fromkeys(suite for (suite, _), hashes in asked.items() if len(hashes) > 1):
            notes.append(f"{suite}: not all models were asked the same samples, or their tokenizers differ.")
        return notes

    def evaluated(self) -> list[Source]:
        """Evaluations of models as they were trained."""
        return [source for source in self.of("eval") if not source.content["model"].get("lam")]

    def needle_notes(self) -> list[str]:
        """What scores of needles rest on: the keys that were asked for, and needle documents in the training text."""
        asked = [source for source in self.evaluated() if source.detail == "niah"]
        odd = [s for s in asked if (s.content.get("settings") or {}).get("keys") == "odd"]
        notes = []
        if odd:
            who = "" if len(odd) == len(asked) else f" by {', '.join(dict.fromkeys(s.title for s in odd))}"
            notes.append(
                f"Needles asked for{who} have keys and values that needle documents of training never hold (`--keys "
                "odd`): not all that RULER draws."
            )
        told: dict[str, list[str]] = {}  # what is known of a text: the models trained on it, by size
        for s in asked:
            share = s.identity.needles if s.identity else None
            known = ""
            if share:
                known = f"{share:.0%} of the training tokens are needle documents; the paper names none in its text"
            elif share == 0 and s in odd:
                known = "the training text has no needle documents"
            if known and s.system:
                variant = s.system.variant.removeprefix(WITH_CONVOLUTION).removeprefix(", ")
                told.setdefault(known, []).append(", ".join(filter(None, (scale_label(s.system.size), variant))))
        notes += [f"Needles at {'; '.join(dict.fromkeys(sizes))}: {known}." for known, sizes in told.items()]
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
    names = Counter((source.kind, source.name) for source in found.sources)
    for source in found.sources:
        if names[source.kind, str(source.named)] > 1:
            whole = source.path / "config.json" if source.kind == "run" else source.path
            source.within = "".join(whole.parts[: -len(source.named.parts)][-1:]).strip("/")
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
    except (OSError, ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        found.problems.append(f"{short} is damaged and left out: {str(error).splitlines()[0]}.")
        return
    try:
        source = recognise(file, content, found)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
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
        if not isinstance(content["suite"], str):
            raise TypeError(f"suite: expected a name, got {content['suite']!r}")
        for score in content["scores"].values():
            if score["value"] is not None:
                float(score["value"])
        check(content)
        content["samples"].get("hash")
        if not content.get("finished", True):
            found.unfinished.append(f"{content['suite']} of {file.parent.name} is not finished.")
        stages = content.get("stages") or {}
        for origin in stages.values():
            check({"provenance": origin}, model=False)
        source = Source("eval", content["suite"], file, content, origins=[stages["score"]] if "score" in stages else [])
        return take_identity(source)
    if content.get("kind") in ANALYSES:
        check(content)
        return take_identity(Source("analysis", content["kind"], file, content))
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
                for row in content["rows"]:
                    if "system" in row:  # named after recipes by older versions
                        row["system"] = row["system"].replace("_", "-")
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
    if model and not isinstance(content["model"].get("hash"), str | None):
        raise TypeError(f"model: hash: expected a text, got {content['model']['hash']!r}")


def run_of(folder: Path, config: dict, found: Collection) -> Source:
    source = Source("run", "", folder, config)
    if "identity" not in config:
        from ccq.train.config import read

        try:
            config["identity"] = asdict(read(folder / "config.json").identity)
        except RunError as error:
            raise ValueError(error) from None
    take_identity(source)
    told = folder / "provenance.json"
    try:
        source.origins = json.loads(told.read_text()) if told.exists() else []
        for origin in source.origins:
            check({"provenance": origin}, model=False)
    except (ValueError, TypeError, AttributeError) as error:
        source.origins = []
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


def longest(runs: list[Source]) -> list[Source]:
    """Of each system the longest runs: shorter ones are those of a sweep over learning rates."""
    most: dict[System | None, int] = {}
    for run in runs:
        most[run.system] = max(most.get(run.system, 0), int(run.content["steps"]))
    return [run for run in runs if int(run.content["steps"]) == most[run.system]]


def rate_of(run: Source) -> float:
    return float(run.content["optimizer"]["lr"])


def last_of(run: Source, name: str) -> float | None:
    values = [record[name] for record in run.records if record.get(name) is not None]
    return float(values[-1]) if values else None


def sizes_of(run: Source) -> tuple[int, int, int] | None:
    """Parameters of the body and of the embeddings, and bytes of the state; None for a config of another version."""
    from ccq.model.config import CCQConfig
    from ccq.model.info import info

    try:
        found = info(CCQConfig(**run.content["model"]), run.content["data"]["length"])
    except (TypeError, ValueError, KeyError):
        return None
    return found.body, found.embedding, found.state_bytes


def text_of_gate(source: Source) -> str:
    """What `ccq analyze gate` read as ordinary text."""
    text = (source.content.get("settings") or {}).get("text")
    return {"filler": "our filler", None: "text"}.get(text, f"the text {text}")


def take_identity(source: Source) -> Source:
    """What the content says that it is of; without that, what it calls its model."""
    told = source.content.get("identity")
    source.identity = Identity(**told) if told else None
    identity = source.identity or Identity(source.content["model"]["name"])
    source.system = System(identity.system, identity.variant, identity.size)
    source.seed, source.tokens = identity.seed, identity.tokens
    return source


def identify(found: Collection) -> None:
    """Say of every evaluation and analysis what it is of, and which run made its model, where that is here too."""
    runs = found.of("run")
    for source in found.sources:
        if source.kind in ("eval", "analysis"):
            inside = [run for run in runs if run.path in source.path.parents]
            same = [run for run in runs if source.identity is not None and run.identity == source.identity]
            source.run = next(iter([*inside, *same]), None)
    # what an intervention that changes nothing gives is what the model gives
    found.sources = [s for s in found.sources if not (s.identity and s.identity.variant.endswith(UNCHANGED))]
