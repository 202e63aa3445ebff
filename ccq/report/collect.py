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

from ccq import shipped
from ccq.files import read_text, stored
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


@dataclass(eq=False)
class Source:
    """One result file, or the folder of a run."""

    kind: str  # eval, run, sweep, bench, analysis
    detail: str  # suite, kind of benchmark or analysis; "" for a run
    path: Path
    content: dict[str, Any]
    system: System | None = None
    seed: int | None = None
    records: list[dict] = field(default_factory=list)  # of a run: its log
    # of a run: one each time that it was begun or went on; of an evaluation in stages: where the model answered
    origins: list[dict] = field(default_factory=list)
    number: int = 0  # of its footnote
    tokens: int | None = None  # that the model was trained on, where known; samples, of a run on recall
    text: str = ""  # of a run on text: the fingerprint of its tokens
    needles: float | None = None  # and the share of needle documents among them, where known
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
        named = self.system is not None and self.system.name in LABELS and self.seed is not None
        return f"{self.subject}, seed {self.seed}" if named else self.subject

    @property
    def subject(self) -> str:
        """The same without the seed."""
        if self.system is None or self.system.name not in LABELS:
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
        return [source for source in self.of("eval") if "at inference" not in str(source.system)]

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
        shares = needle_shares(self.of("run"))
        told: dict[str, list[str]] = {}  # what is known of a text: the models trained on it, by size
        for s in asked:
            ships = None if s.run else shipped_facts(s.content["model"]["name"])
            share = shares.get(s.run.text) if s.run else ships and needle_share(ships)
            path = s.run.content["data"].get("path") if s.run else None
            text = Path(path).name if path else ""
            known = ""
            if share:
                known = f"{share:.0%} of the training tokens are needle documents; the paper names none in its text"
            elif share == 0 and s in odd:
                known = "the training text has no needle documents"
            elif text and s in odd:
                known = (
                    f"the training text is called `{text}`; how much of it is needle documents, its files do not say "
                    "(`docs/assumptions.md` does, of the runs in the repository)"
                )
            if known:
                size = scale_label(s.system.size) if s.system else ""
                other = text and s.system and s.system.variant.endswith(text_variant(text))
                told.setdefault(known, []).append(f"{size}, {text_variant(text)}" if other else size)
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
        return Source("eval", content["suite"], file, content, origins=[stages["score"]] if "score" in stages else [])
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
    if model and not isinstance(content["model"].get("hash"), str | None):
        raise TypeError(f"model: hash: expected a text, got {content['model']['hash']!r}")


def run_of(folder: Path, config: dict, found: Collection) -> Source:
    source = Source("run", "", folder, config)
    source.system, source.seed = from_config(config, folder.name)
    source.tokens = int(config["steps"]) * trained_on(config["data"])[0]
    told = folder / "provenance.json"
    try:
        source.origins = json.loads(told.read_text()) if told.exists() else []
        for origin in source.origins:
            check({"provenance": origin}, model=False)
    except (ValueError, TypeError, AttributeError) as error:
        source.origins = []
        found.problems.append(f"{folder.name}/provenance.json is damaged and left out: {str(error).splitlines()[0]}.")
    data = folder / "data.json"
    try:
        told_of_data: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {"path": None}
        source.text = str(told_of_data["path"] or "")
        if told_of_data.get("tokens"):
            source.needles = told_of_data["needle_tokens"] / told_of_data["tokens"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found.problems.append(f"{folder.name}/data.json is damaged and left out.")
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


def trained_on(data: dict) -> tuple[int, str]:
    """(how much of it a step takes, what that is) of a run's data."""
    if data.get("source") == "tokens":
        return int(data["batch"]) * int(data["length"]), "tokens"
    return int(data.get("batch") or 0), "samples"


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
            run.system = replace(run.system, variant=", ".join(filter(None, (run.system.variant, text_variant(name)))))


def text_variant(name: str) -> str:
    return f"text {name}"


def may_be(source: Source, run: Source) -> bool:
    """Whether a result can be of a run by the number of parameters, where both are known."""
    count = source.content["model"].get("parameters")
    sizes = sizes_of(run)
    return count is None or sizes is None or count == sizes[0] + sizes[1]


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


def shipped_model(name: str) -> tuple[System, int | None, int] | None:
    """System, seed and training tokens of a model that ships with the package; None for any other name."""
    if name not in shipped.names():
        return None
    folder = shipped.root() / name
    try:
        told = shipped.manifest(folder)
        system, _ = from_config({"model": json.loads((folder / "config.json").read_text())}, name)
        return system, told["seed"], int(told["tokens"])
    except (OSError, ValueError, KeyError, TypeError):  # damaged: `ccq.load` names it
        return None


def shipped_facts(name: str) -> dict[str, Any] | None:
    """What results.json of a model that ships says of its training; None for any other name."""
    if name not in shipped.names():
        return None
    try:
        return json.loads((shipped.root() / name / "results.json").read_text())
    except (OSError, ValueError):
        return None


def needle_share(facts: dict[str, Any]) -> float:
    return facts["data"]["needle_tokens"] / facts["data"]["tokens"]


def needle_shares(runs: list[Source]) -> dict[str, float]:
    """{fingerprint of a text: the share of needle documents in it}, where a run says it or a model that ships was
    trained on it: the run with its command and date."""
    shares = {run.text: run.needles for run in runs if run.needles is not None}
    for name in shipped.names():
        facts = shipped_facts(name) or {}
        for run in runs:
            first = run.origins[0] if run.origins else {}
            if run.text and facts.get("data") and all(facts.get(k) == first.get(k) for k in ("command", "date")):
                shares[run.text] = needle_share(facts)
    return shares


def text_of_gate(source: Source) -> str:
    """What `ccq analyze gate` read as ordinary text."""
    text = (source.content.get("settings") or {}).get("text")
    return {"filler": "our filler", None: "text"}.get(text, f"the text {text}")


def identify(found: Collection) -> None:
    """Say of every evaluation and analysis what it is of: the run it lies in, a model that ships, the run it is named
    after, else its names."""
    runs = found.of("run")
    tell_data_apart(runs)
    judged = [source for source in found.sources if source.kind in ("eval", "analysis")]
    hashes: dict[str, Source] = {}  # of weights that were evaluated within the folder of a run
    for source in judged:
        source.run = next((run for run in runs if run.path in source.path.parents), None)
        if source.run is not None and (known := source.content["model"].get("hash")):
            hashes.setdefault(known, source.run)
    for source in judged:
        name, _, change = source.content["model"]["name"].partition(", lam ")  # as `ccq analyze intervene` calls it
        named = [run for run in runs if run.path.name in (name, source.path.parent.name) and may_be(source, run)]
        ships = shipped_model(name)
        source.run = source.run or hashes.get(source.content["model"].get("hash") or "")
        if source.run is None and ships is None:
            source.run = next(iter(named), None)
        if source.run is not None:
            source.system, source.seed, source.tokens = source.run.system, source.run.seed, source.run.tokens
        elif ships is not None:  # whatever run has that name: the weights are not known to be its
            source.system, source.seed, source.tokens = ships
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
