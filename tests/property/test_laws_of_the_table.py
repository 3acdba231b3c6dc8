"""Laws of the table: its running sums are those of a table just made, whatever its life was."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kata_resmgr.demand import ContainerTable, Sums
from tests.examples import record
from tests.property.strategies import NAMES, containers

LIVES = st.lists(st.tuples(NAMES, st.none() | containers()), max_size=20)
"""Containers that come, change and go."""


def _summed_afresh(table: ContainerTable) -> Sums:
    demands = [record.demand for record in table.records.values()]
    return Sums(
        containers=len(demands),
        quota_vcpus=sum((Fraction(demand.quota, demand.period) for demand in demands), start=Fraction()),
        cpuset_vcpus=len(frozenset().union(*(demand.cpus for demand in demands))),
        memory=sum(demand.memory for demand in demands),
        shares=sum(demand.shares for demand in demands),
    )


@given(LIVES)
def test_the_sums_are_those_of_what_is_there(life: list[tuple[str, bytes | None]]) -> None:
    table = ContainerTable()
    for name, text in life:
        table.set(name, None if text is None else record(text))
        assert table.sums() == _summed_afresh(table)


@given(LIVES, LIVES)
def test_what_is_undone_leaves_no_trace(
    life: list[tuple[str, bytes | None]], undone: list[tuple[str, bytes | None]]
) -> None:
    table = ContainerTable()
    for name, text in life:
        table.set(name, None if text is None else record(text))
    before, records = table.sums(), dict(table.records)
    takes_back = [(name, table.set(name, None if text is None else record(text))) for name, text in undone]
    for name, present in reversed(takes_back):
        table.set(name, present)
    assert table.sums() == before
    assert dict(table.records) == records


@given(
    st.dictionaries(NAMES, containers()).flatmap(lambda final: st.tuples(*[st.permutations(list(final.items()))] * 2))
)
def test_the_order_of_creation_does_not_matter(orders: tuple[list[tuple[str, bytes]], ...]) -> None:
    tables = [ContainerTable() for _ in orders]
    for table, order in zip(tables, orders, strict=True):
        for name, text in order:
            table.set(name, record(text))
    assert tables[0].sums() == tables[1].sums()
