"""Rows of the benchmark: one figure each, beside the floor that was measured in the same run."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    `value` and `floor` are medians over `runs` turns of subject and floor, in `unit`; `ratio` is the median of the
    turns' own ratios, subject over floor, or `value` itself where there is no floor; `spread` is the span of those
    ratios (of the values, without a floor), largest minus smallest.
    """

    part: str
    case: str
    value: float
    unit: str
    floor: float
    floor_name: str
    ratio: float
    runs: int
    p50: float
    spread: float
    wanted: str = ""
    """The bound on `ratio` (or on `value`, where there is no floor) that the project holds itself to."""
    met: bool | None = None


def row(
    part: str,
    case: str,
    unit: str,
    subject: Sequence[float],
    *,
    floor: Sequence[float] = (),
    floor_name: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """A row of paired turns: ``subject[i]`` and ``floor[i]`` were measured one after the other."""
    ratios = [mine / theirs for mine, theirs in zip(subject, floor, strict=False)] if floor else []
    median = statistics.median(subject)
    ratio = statistics.median(ratios) if ratios else median
    wanted, met = "", None
    if at_least is not None:
        wanted, met = f">= {at_least:g}", ratio >= at_least
    elif at_most is not None:
        wanted, met = f"<= {at_most:g}", ratio <= at_most
    spans = ratios or list(subject)
    return Row(
        part=part,
        case=case,
        value=median,
        unit=unit,
        floor=statistics.median(floor) if floor else 0.0,
        floor_name=floor_name,
        ratio=ratio,
        runs=len(subject),
        p50=median,
        spread=max(spans) - min(spans),
        wanted=wanted,
        met=met,
    )


def show(rows: Sequence[Row]) -> None:
    """Prints the rows as one table a part."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    for part in dict.fromkeys(each.part for each in rows):
        table = Table(title=part, title_justify="left")
        for name in ("case", "value", "unit", "floor", "of", "ratio", "spread", "wanted", ""):
            table.add_column(name, justify="left" if name in ("case", "unit", "of", "wanted") else "right")
        for each in (each for each in rows if each.part == part):
            mark = "" if each.met is None else "[green]yes[/]" if each.met else "[red]no[/]"
            table.add_row(
                each.case,
                f"{each.value:,.4g}" if each.value < 1e4 else f"{each.value:,.0f}",
                each.unit,
                (f"{each.floor:,.4g}" if each.floor < 1e4 else f"{each.floor:,.0f}") if each.floor_name else "",
                each.floor_name,
                f"{each.ratio:.3g}" if each.floor_name else "",
                f"{each.spread:.2g}",
                each.wanted,
                mark,
            )
        console.print(table)


def save(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows as a JSON list, keeping those of other parts that the file already holds."""
    parts = {each.part for each in rows}
    kept = [each for each in json.loads(path.read_text()) if each["part"] not in parts] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*kept, *(asdict(each) for each in rows)], indent=1) + "\n")
