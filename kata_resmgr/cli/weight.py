"""``weight``: from CPU shares or milliCPU to a cgroup v2 weight, and back. It asks nobody."""

from __future__ import annotations

import argparse

from kata_resmgr.weight import Formula, Range, Unit, cpu_weight, milli_cpu_range, parse, shares_of, shares_range


def weight(parser: argparse.ArgumentParser) -> None:
    units, formulas = [unit.value for unit in Unit], [formula.value for formula in Formula]
    parser.add_argument("value", metavar="VALUE", help="a whole number")
    parser.add_argument("--from", dest="unit", choices=units, default="shares", help="what VALUE is; else shares")
    parser.add_argument(
        "--formula",
        choices=formulas,
        default="quadratic",
        help="quadratic (the default) as runc 1.3.2, crun 1.23 and later ones count, linear as those before",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=lambda given: _weight(parser, given))


def _weight(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    unit, formula = Unit(given.unit), Formula(given.formula)
    try:
        value = parse(given.value, unit)
    except ValueError as error:
        parser.error(str(error))
    if unit is Unit.WEIGHT:
        answer, line = _from_weight(value, formula)
    else:
        answer, line = _to_weight(value, unit, formula)
    if given.json:
        import json

        line = json.dumps({**answer, "formula": formula.value})
    print(line)
    return 0


def _to_weight(value: int, unit: Unit, formula: Formula) -> tuple[dict[str, object], str]:
    milli_cpu, shares = (value, shares_of(value)) if unit is Unit.MILLI_CPU else (None, value)
    weight = cpu_weight(shares, formula)
    source = f"{shares} shares" if milli_cpu is None else f"{milli_cpu}m CPU, {shares} shares"
    told = "no weight: 0 is unset" if weight is None else f"weight {weight}"
    return {"shares": shares, "milliCpu": milli_cpu, "cpuWeight": weight}, f"{source}: {told} ({formula})"


def _from_weight(weight: int, formula: Formula) -> tuple[dict[str, object], str]:
    shares, milli_cpu = shares_range(weight, formula), milli_cpu_range(weight, formula)
    answer = {"cpuWeight": weight, "shares": _ends(shares), "milliCpu": _ends(milli_cpu)}
    return answer, f"weight {weight}: {_told(shares)} shares, {_told(milli_cpu, 'm')} CPU ({formula})"


def _ends(range_: Range) -> dict[str, int | None]:
    return {"min": range_[0], "max": range_[1]}


def _told(range_: Range, unit: str = "") -> str:
    least, most = range_
    return f"{least}{unit} and more" if most is None else f"{least}{unit}..{most}{unit}"
