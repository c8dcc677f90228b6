"""Fuel and its peers by turns, on the same weights, prompts, batches, contexts and threads.

bench/peers.sh .peers
python bench/compare.py --peers .peers --out bench/results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from comparison.cases import Case, cases_of
from comparison.plot import check_plotting, draw
from comparison.report import Results, rates_table, ratios_table, remarks
from comparison.roster import FUEL, ROSTER, WORKERS, Absent, Participant
from comparison.workers import Worker

from fuel_core import registry
from fuel_core.cli.console import echo_table
from fuel_core.contracts.errors import FuelError, InvalidRequestError
from fuel_core.registry.cache import cache_dir

PAUSE_S = 0.5
"""Between two measurements, until the threads of the last one sleep: OpenMP's may spin for 0.2 s."""


def measure(
    workers: Mapping[Participant, Worker],
    cases: Sequence[Case],
    rounds: int,
    results: Results,
    pause: Callable[[], None],
) -> None:
    """Ask everyone each case ``rounds`` times by turns, and once before, when first calls compile."""
    for case in cases:
        for number in range(-1, rounds):
            for who in turns([who for who in workers if not (case.ours and who.rival)], number):
                if who.name not in results.errors[case]:
                    pause()
                    _ask(workers[who], who.name, case, number, results)


def turns(everyone: list[Participant], number: int) -> list[Participant]:
    """The order of a round: each round another begins."""
    first = number % len(everyone) if everyone else 0
    return everyone[first:] + everyone[:first]


def _ask(worker: Worker, name: str, case: Case, number: int, results: Results) -> None:
    try:
        rate = worker.ask(case.question)["tokens_per_s"]
        machine = worker.ask({"op": "machine"}) if name == FUEL.name else None
    except Absent as absent:
        results.errors[case][name] = absent.reason
        _say(f"{case.name}: {name} failed: {absent.reason}")
        return
    if number < 0:
        return
    results.rates[case][name][number] = rate
    if machine is not None:
        results.machine[case][number] = machine
    _say(f"{case.name}, round {number + 1}: {name} {rate:.4g} tokens/s")


def start(
    participants: Iterable[Participant],
    command: Callable[[Participant], list[str]],
    results: Results,
    *,
    threads: int,
    logs: Path,
    patience: float,
) -> dict[Participant, Worker]:
    """A worker of each who can take part; the others are in ``results.absent``."""
    workers = {}
    for each in participants:
        _say(f"starting {each.name}")
        log = logs / f"{each.name.replace(' ', '-')}.log"
        try:
            worker = Worker(command(each), threads=threads, log=log, patience=patience)
        except Absent as absent:
            results.absent[each.name] = absent.reason
            _say(f"{each.name} is absent: {absent.reason}")
            continue
        workers[each], results.about[each.name] = worker, worker.about
    return workers


def weights_of(model: str, python: str = sys.executable) -> dict[str, Path | Absent]:
    """Where the weights are: the GGUF file, and a directory of the same in float32, made once."""
    path = registry.resolve(model)
    if path.is_dir():
        return {"gguf": Absent(f"it reads GGUF files, and {path} is none"), "float32": path}
    plain = cache_dir() / "bench" / f"{path.stem}-float32"
    if not (plain / "config.json").exists():
        _say(f"dequantizing {path.name}")
        made = [python, str(WORKERS / "dequantize.py"), str(path), str(plain)]
        ran = subprocess.run(made, capture_output=True, text=True, check=False)
        if ran.returncode:
            last = ran.stderr.strip().splitlines()[-1:]
            return {"gguf": path, "float32": Absent(f"no dequantized weights: {''.join(last)}")}
    return {"gguf": path, "float32": plain}


def chosen(names: str | None) -> list[Participant]:
    """The roster, or those of a list of names.

    Raises:
        InvalidRequestError: a name that nobody has.
    """
    if names is None:
        return list(ROSTER)
    wanted = [name.strip() for name in names.split(",")]
    known = {each.name: each for each in ROSTER}
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidRequestError(
            f"nobody is called {unknown[0]!r}", needed=f"names of {', '.join(known)}", remedy="correct it"
        )
    return [known[name] for name in wanted]


def main() -> None:
    args = _arguments()
    try:
        if not args.no_plot:
            check_plotting()
        _run(args)
    except FuelError as error:
        sys.exit(f"compare: {error}")


def _run(args: argparse.Namespace) -> None:
    who, results = chosen(args.only), Results()
    cases = cases_of(
        args.batches, args.context, args.contexts, args.context_batches, args.prompt, args.steps, args.ragged
    )
    args.out.mkdir(parents=True, exist_ok=True)
    weights = weights_of(args.model)
    with ExitStack() as stack:
        workers = start(
            who,
            lambda each: each.command(args.peers, weights, args.threads),
            results,
            threads=args.threads,
            logs=args.out,
            patience=args.patience,
        )
        for worker in workers.values():
            stack.callback(worker.close)
        measure(workers, cases, args.rounds, results, lambda: time.sleep(PAUSE_S))
    _write(results, who, args)


def _write(results: Results, who: Sequence[Participant], args: argparse.Namespace) -> None:
    names = [each.name for each in who]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    (args.out / "compare.json").write_text(json.dumps({"settings": settings, **results.document()}, indent=1))
    echo_table(*rates_table(results, names))
    print()
    echo_table(*ratios_table(results, FUEL.name, [each.name for each in who if each.rival]))
    print()
    print("\n".join(remarks(results)))
    if not results.about:
        sys.exit("compare: nobody could take part")
    if not args.no_plot:
        draw(results, FUEL.name, names, args.out / "compare.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a directory, or an alias")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="where bench/peers.sh made them")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="JSON, plot and logs")
    parser.add_argument("--only", help="names with commas between them, such as Fuel,llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, default=128, help="of the batches")
    parser.add_argument("--contexts", type=_numbers, default=[512, 2048])
    parser.add_argument("--context-batches", type=_numbers, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512, help="tokens; 0 for none")
    parser.add_argument("--ragged", type=int, default=32, help="sessions; 0 for none")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--patience", type=float, default=1200, help="seconds for a start or an answer")
    parser.add_argument("--no-plot", action="store_true")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(entry) for entry in text.split(",") if entry]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
