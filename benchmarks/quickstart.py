"""Measures the quickstart and writes docs/evidence/quickstart.json and .png; then `python docs/render.py` fills the README.

    python benchmarks/quickstart.py                                  seeds 1, 2 and 3
    python benchmarks/quickstart.py --seeds 4 5 --set steps=80 --out docs/evidence/longer.json

Each seed runs in a process of its own, through the same session as `oneloop quickstart`: measure, train, measure again. Seeds
that the file already holds are skipped, and a seed that was interrupted goes on from its run directory; so calling it again
finishes what is left. Seeds of other settings are refused, never mixed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from oneloop.evaluation.intervals import paired, wilson
from oneloop.tracking import evidence
from oneloop.tracking.evidence import Evidence, EvidenceError, Figure

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5% quantiles
RATES = {
    "accuracy": "accuracy",
    "format": "answers with the format",
    "accuracy_given_format": "accuracy given format",
    "truncated": "truncated answers",
}


# ---------------------------------------------------------------------------- one seed, in a process of its own


def measure_seed(recipe: str, changes: list[str], folder: Path) -> dict[str, Any]:
    """Before, training, after. Everything the evidence needs to know about one seed, as JSON values."""
    from oneloop.cli import show
    from oneloop.session import measured, resume, run_to_end, start

    begin, is_resumed = time.perf_counter(), (folder / "run.json").exists()
    session = resume(folder) if is_resumed else start(recipe, changes, folder, report=True)
    try:
        before = measured(session, "before")
        if not run_to_end(session, show):
            raise SystemExit(f"stopped; the same command goes on with {folder}")
        after = measured(session, "after")
        lines = session.folder.measured()
    finally:
        session.close()
    mean, low, high = paired([float(x) for x in before.solved], [float(x) for x in after.solved])
    return {
        "before": before.summary(),
        "after": after.summary(),
        "gain": {"value": mean, "low": low, "high": high},
        "solved_before": "".join(str(int(x)) for x in before.solved),
        "solved_after": "".join(str(int(x)) for x in after.solved),
        "minutes": None if is_resumed else (time.perf_counter() - begin) / 60,
        "minutes_training": sum(m["time/step"] for m in lines) / 60,
        "peak_bytes": peak_bytes(),
        "steps": len(lines),
        "curve": [[m["step"], m.get("collect/score")] for m in lines],
        "validated": [[m["step"] + 1, m["test/accuracy"]] for m in lines if "test/accuracy" in m],
    }


def peak_bytes() -> int:
    """The most memory this process has held at once (VmHWM); scorers in the sandbox are processes of their own."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


# ---------------------------------------------------------------------------- runs into figures


def over_seeds(values: list[float], problems: tuple[float, float], what: str, unit: str) -> Figure:
    """The mean over seeds. Its interval is Student's over seeds or the one over problems, end by end whichever is wider.

    Seeds share their problems, so neither alone says how far the mean may be off: three equal seeds do not make it exact.
    """
    mean, n = float(np.mean(values)), len(values)
    half = STUDENT[n - 1] * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    low, high = min(mean - half, problems[0], mean), max(mean + half, problems[1], mean)
    if unit == "share":
        low, high = max(0.0, low), min(1.0, high)
    how = (
        f"mean over {n} seed{'s' * (n > 1)} of {what}; the wider, end by end, of the intervals over problems and over seeds (t)"
    )
    return Figure(mean, (low, high), unit, how)


def figures(runs: list[dict[str, Any]]) -> dict[str, Figure]:
    """Every figure that the README or a page may show."""
    n = runs[0]["after"]["problems"]
    out = {
        "problems": Figure(n, None, "count", "held-out problems, the same for every seed"),
        "seeds": Figure(len(runs), None, "count", "seeds measured"),
        "steps": Figure(runs[0]["steps"], None, "count", "training steps of each seed"),
        "minutes_training": Figure(
            max(r["minutes_training"] for r in runs), None, "minutes", "slowest seed: sum over its steps"
        ),
        "peak_memory": Figure(max(r["peak_bytes"] for r in runs), None, "bytes", "largest VmHWM of the seeds' processes"),
    }
    if whole := [r["minutes"] for r in runs if r["minutes"] is not None]:
        how = "slowest seed: loading, measuring, training, measuring again; uninterrupted runs only"
        out["minutes"] = Figure(max(whole), None, "minutes", how)
    for rate in RATES:
        for when in ("before", "after"):
            out |= rates(runs, rate, when)
    before, after = (np.mean([[int(x) for x in r[f"solved_{w}"]] for r in runs], axis=0) for w in ("before", "after"))
    over_problems = [100 * x for x in paired(before.tolist(), after.tolist())[1:]]
    gains = [100 * r["gain"]["value"] for r in runs]
    what = "accuracy after less accuracy before on the same problems (bootstrap)"
    out["gain"] = over_seeds(gains, (over_problems[0], over_problems[1]), what, "points")
    for r in runs:
        mean, low, high = (100 * r["gain"][k] for k in ("value", "low", "high"))
        how = "after less before on the same problems; bootstrap over problems"
        out[f"gain_seed_{r['seed']}"] = Figure(mean, (min(low, mean), max(high, mean)), "points", how)
        out[f"minutes_seed_{r['seed']}"] = Figure(r["minutes_training"], None, "minutes", "sum over its steps")
        out[f"peak_memory_seed_{r['seed']}"] = Figure(r["peak_bytes"], None, "bytes", "VmHWM of its process")
    return out


def rates(runs: list[dict[str, Any]], rate: str, when: str) -> dict[str, Figure]:
    """One rate for each seed with Wilson's interval, and for all."""
    known = [r for r in runs if r[when][rate]["value"] is not None]
    out = {}
    for r in known:
        m = r[when][rate]
        how = f"{rate} {when} training, greedy, {m['of']} problems; Wilson's interval"
        out[f"{rate}_{when}_seed_{r['seed']}"] = Figure(m["value"], (m["low"], m["high"]), "share", how)
    if not known:
        return out
    values, n = [r[when][rate]["value"] for r in known], min(r[when][rate]["of"] for r in known)
    over_problems = wilson(float(np.mean(values)) * n, n)
    return {**out, f"{rate}_{when}": over_seeds(values, over_problems, f"{rate} {when} training, greedy (Wilson)", "share")}


def tables(runs: list[dict[str, Any]], names: set[str]) -> dict[str, Any]:
    """Before and after, all seeds together; and a row for each seed."""
    rows = [
        [label, *(f"{r}_{w}" if f"{r}_{w}" in names else "none" for w in ("before", "after"))] for r, label in RATES.items()
    ]
    rows.append(["gain, same problems", "", "gain"])
    columns = ["accuracy_before", "accuracy_after", "gain", "truncated_after", "minutes", "peak_memory"]
    each = [[str(r["seed"]), *(f"{c}_seed_{r['seed']}" for c in columns)] for r in runs]
    head = ["seed", "accuracy before", "accuracy after", "gain", "truncated after", "training", "peak memory"]
    return {"summary": {"columns": ["", "before", "after"], "rows": rows}, "per_seed": {"columns": head, "rows": each}}


def picture(runs: list[dict[str, Any]], path: Path, title: str) -> None:
    """The score of sampled answers by step, a line a seed, with the held-out accuracy before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from oneloop.tracking.plots import running_mean

    colours = ("#2f6690", "#d1495b", "#66a182", "#8d6a9f", "#c98b2b")
    figure, axis = plt.subplots(figsize=(8, 4.6), constrained_layout=True)
    for i, r in enumerate(runs):
        colour = colours[i % len(colours)]
        step, score = zip(*[(s, v) for s, v in r["curve"] if v is not None], strict=True) if r["curve"] else ((), ())
        axis.plot(step, score, color=colour, alpha=0.25, lw=1)
        if step:
            axis.plot(step, running_mean(np.array(score)), color=colour, lw=2, label=f"seed {r['seed']}, sampled, training")
        if r["validated"]:
            axis.plot(*zip(*r["validated"], strict=True), color=colour, ls=":", marker=".", lw=1)
        for at, when in ((0, "before"), (r["steps"], "after")):
            m = r[when]["accuracy"]
            error = [[m["value"] - m["low"]], [m["high"] - m["value"]]]
            label = f"seed {r['seed']}, greedy, held-out" if when == "after" else None
            axis.errorbar(at + 0.25 * i, m["value"], error, fmt="o", color=colour, capsize=4, label=label)
    axis.set(xlabel="step", ylabel="share of right answers", title=title, ylim=(0, 1))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------- all seeds


def settings_of(recipe: str, changes: list[str]) -> str:
    """A digest of the recipe after changes, the seed left out: what all seeds of a file share."""
    from oneloop.recipe import plain
    from oneloop.session import checked

    body = {k: v for k, v in plain(checked(recipe, changes)).items() if k != "seed"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def known_runs(out: Path, settings: str) -> list[dict[str, Any]]:
    """The seeds that the file already holds. Raises EvidenceError where they were measured with other settings."""
    runs = [dict(r) for r in evidence.read(out).runs] if out.exists() else []
    if any(r["settings"] != settings for r in runs):
        raise EvidenceError(f"{out} holds seeds of other settings: give another --out, or move it away")
    return runs


def run_seed(args: argparse.Namespace, seed: int, settings: str) -> dict[str, Any]:
    """One seed in its own process, so that its peak memory is its own."""
    folder = args.runs / f"{args.out.stem}-{settings[:8]}-seed-{seed}"
    result = folder / "result.json"
    if not result.exists():
        command = [sys.executable, __file__, "--recipe", args.recipe, "--one", str(seed), "--runs", str(folder)]
        print(f"seed {seed}: {folder}", flush=True)
        done = subprocess.run([*command, *(x for c in args.set for x in ("--set", c))], check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"seed {seed} did not finish (exit code {done.returncode}): the same command goes on with it")
    return {"seed": seed, "settings": settings, **json.loads(result.read_text())}


def collect(args: argparse.Namespace, runs: list[dict[str, Any]]) -> Evidence:
    """The evidence of these runs. Machine, versions and commit are the last seed's; where seeds differ a note says so."""
    last = runs[-1]["here"]
    notes = ["peak memory is that of the training process; scorers run in processes of their own"]
    for name in ("commit", "versions", "cpu_flags", "cores"):
        if any(r["here"][name] != last[name] for r in runs):
            notes.append(f"the seeds were not all measured with the same {name}: see runs")
    numbers = figures(runs)
    picture_of = {"file": f"{args.out.stem}.png", "caption": "Learning curves of all seeds"}
    return Evidence(
        name=args.out.stem,
        recipe=args.recipe,
        changes=tuple(args.set),
        seeds=tuple(r["seed"] for r in runs),
        figures=numbers,
        command=command_of(args, [r["seed"] for r in runs]),
        runs=tuple(runs),
        tables=tables(runs, set(numbers)),
        pictures={"curves": picture_of},
        **{**last, "notes": tuple(notes), "cpu_flags": tuple(last["cpu_flags"])},
    )


def command_of(args: argparse.Namespace, seeds: list[int]) -> str:
    """The command that measures these seeds again."""
    words = ["python", "benchmarks/quickstart.py", "--seeds", *map(str, seeds)]
    words += ["--recipe", args.recipe] if args.recipe != "quickstart" else []
    return shlex.join([*words, *(x for c in args.set for x in ("--set", c))])


def fetch(recipe: str, changes: list[str]) -> None:
    """The model, where it has a name and is not here yet: that is set-up, not training."""
    from oneloop.engine.hub import NAMED, cached, pull
    from oneloop.session import checked

    source = checked(recipe, changes).models["policy"].source
    if source in NAMED and cached(source) is None:
        print(f"fetching {source} ...", flush=True)
        pull(source)


def run(args: argparse.Namespace) -> Path:
    """Every seed that is missing, the evidence written anew after each. Raises EvidenceError before anything runs."""
    if path := evidence.absolute_path([args.recipe, *args.set]):
        raise EvidenceError(f"{path} means nothing elsewhere: give it relative to the repository")
    if len({*args.seeds}) > len(STUDENT) + 1:
        raise EvidenceError(f"at most {len(STUDENT) + 1} seeds a file")
    settings = settings_of(args.recipe, args.set)
    runs = known_runs(args.out, settings)
    fetch(args.recipe, args.set)
    for seed in args.seeds:
        if any(r["seed"] == seed for r in runs):
            print(f"seed {seed}: already in {args.out}", flush=True)
            continue
        runs = sorted([*runs, run_seed(args, seed, settings)], key=lambda r: r["seed"])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        picture(runs, args.out.with_suffix(".png"), f"{args.out.stem}: {len(runs)} seeds")
        evidence.write(collect(args, runs), args.out.parent)
    return args.out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart", help="a recipe's name, or a Python file that holds one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="a change of the recipe; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/quickstart.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="where the run directories go")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.one is None:
            print(f"written: {run(args)}; now run: python docs/render.py")
            return
        said = measure_seed(args.recipe, [*args.set, f"seed={args.one}"], args.runs)
        body = {**said, "here": {k: v for k, v in evidence.here().items() if k != "notes"}}
        (args.runs / "result.json").write_text(json.dumps(body))
    except Exception as error:
        from oneloop.cli import is_expected

        if not (is_expected(error) or isinstance(error, EvidenceError)):
            raise
        print(f"quickstart: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
