"""The benchmark suite: ``python -m benchmarks [CASE ...]``.

Without names it runs every case; ``--list`` shows them with their targets. Figures are printed and written to
``benchmarks/figures`` (not in git) as JSON and a Markdown table, which keep the other cases of earlier runs. What is
claimed is copied by hand into ``results.toml``; ``python -m benchmarks.results`` makes ``RESULTS.md`` from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.harness import report, suite
from benchmarks.harness.figures import Outcome, Settings


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", metavar="CASE", help="cases to run; all where none is named")
    options.add_argument("--list", action="store_true", help="show the cases and their targets")
    size = options.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="seconds in all, for tests; no figures, nothing written")
    size.add_argument("--quick", action="store_true", help="fewer turns and smaller tables")
    options.add_argument("--out", type=Path, help="folder for figures.json and figures.md")
    options.add_argument("--dir", type=Path, default=Path("bench-data"), help="where temporary files go")
    options.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the real data sets")
    options.add_argument("--table", type=Path, help="keep the larger-than-memory table here, and use it again")
    options.add_argument("--seed", type=int, default=0, help="of ids, gradients and weights")
    options.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)  # the child's half of `suite.run_case`
    return options.parse_args()


def show_list() -> None:
    width = max(len(case.name) for case in suite.CASES)
    for case in suite.CASES:
        target = f"\n{'':{width}}  target: {case.target}" if case.target else ""
        alone = "" if case.default else " [only by name]"
        print(f"{case.name:{width}}  {case.what}{alone}{target}")


def main() -> None:
    options = arguments()
    if options.list:
        return show_list()
    size = "tiny" if options.tiny else "quick" if options.quick else "full"
    settings = Settings(size=size, dir=options.dir, seed=options.seed, data=options.data, table=options.table)
    try:
        cases = suite.find(options.names, quick=options.quick)
    except KeyError as error:
        sys.exit(error.args[0])
    # On SIGTERM exit through `finally` blocks: a case removes its files, the suite ends the case's process group.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if options.outcome:
        outcome = suite.run_here(cases[0], settings)
        options.outcome.write_text(json.dumps(outcome.to_json()))
        return None

    # Absolute: a case's process starts in the root of the repository.
    passed_on = [
        "--dir",
        str(options.dir.resolve()),
        "--data",
        str(options.data.resolve()),
        "--seed",
        str(options.seed),
    ]
    passed_on += [f"--{size}"] if size != "full" else []
    passed_on += ["--table", str(options.table.resolve())] if options.table else []
    out = options.out or (None if options.tiny else suite.ROOT / "benchmarks" / "figures")
    outcomes: list[Outcome] = []
    for case in cases:
        print(f"\n== {case.name}: {case.what}", flush=True)
        outcome = suite.run_case(case, settings, passed_on)
        outcomes.append(outcome)
        report.show(outcome)
        if out is not None:  # after each case: what was measured stays if a later one is interrupted
            report.write(out, outcomes)
    failed = [outcome.case for outcome in outcomes if outcome.failed]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main()
