"""A lumped thermal network, integrated exactly for power that is constant over a step.

Temperatures are degrees Celsius, heat capacities J/K, resistances K/W, powers W, times s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from switchgear.daemon.simulation.scenario import Node

Matrix: TypeAlias = list[list[float]]

AMBIENT: Final = "ambient"
# Terms of the series of exp(M) for |M| <= 1/2: the first one left out is below 1e-18.
_TERMS: Final = 15


class Network:
    """Nodes that exchange heat with one neighbour each, and in the end with the air.

    `temperatures_c` is in the order of `names`; it belongs to the network and is replaced, not
    changed, at each step. All nodes start at `start_c`, or at the ambient temperature.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        ambient_c: float,
        step_s: float,
        start_c: float | None = None,
    ) -> None:
        self.names: Final = tuple(nodes)
        self.ambient_c: Final = ambient_c
        self.step_s: Final = step_s
        first_c = ambient_c if start_c is None else start_c
        self.temperatures_c: list[float] = [first_c] * len(nodes)
        decay, response = step_matrices(nodes, step_s)
        self._rows: Final = [
            tuple(zip(of_rise, of_power, strict=True))
            for of_rise, of_power in zip(decay, response, strict=True)
        ]

    def step(self, powers_w: Sequence[float]) -> None:
        """Goes on by `step_s` with this power into each node."""
        ambient = self.ambient_c
        rises = [temperature - ambient for temperature in self.temperatures_c]
        after = []
        for row in self._rows:
            temperature = ambient
            for (of_rise, of_power), rise, power in zip(row, rises, powers_w, strict=True):
                temperature += of_rise * rise + of_power * power

            after.append(temperature)

        self.temperatures_c = after


def step_matrices(nodes: Mapping[str, Node], step_s: float) -> tuple[Matrix, Matrix]:
    """D and R of `rise' = D rise + R power` over a step, rises being against the air.

    For dx/dt = A x + B p with constant p, exp of [[A, B], [0, 0]] times the step holds both.
    """
    names = list(nodes)
    count = len(names)
    matrix = [[0.0] * (2 * count) for _ in range(2 * count)]
    for row, (name, node) in enumerate(nodes.items()):
        conductance = 1.0 / node.r_k_w
        matrix[row][row] -= conductance / node.c_j_k
        matrix[row][count + row] = 1.0 / node.c_j_k
        if node.to == AMBIENT:
            continue

        other = names.index(node.to)
        matrix[row][other] += conductance / node.c_j_k
        matrix[other][row] += conductance / nodes[node.to].c_j_k
        matrix[other][other] -= conductance / nodes[node.to].c_j_k
        if name == node.to:
            raise ValueError(f"node {name} leads to itself")

    exponential = _exp([[value * step_s for value in row] for row in matrix])
    decay = [row[:count] for row in exponential[:count]]
    response = [row[count:] for row in exponential[:count]]
    return decay, response


def _exp(matrix: Matrix) -> Matrix:
    """The matrix exponential by scaling, series and squaring."""
    norm = max(sum(abs(value) for value in row) for row in matrix)
    halvings = 0
    while norm > 0.5:
        norm /= 2.0
        halvings += 1

    scale = 0.5**halvings
    scaled = [[value * scale for value in row] for row in matrix]
    size = len(matrix)
    result = [[float(row == column) for column in range(size)] for row in range(size)]
    term = result
    for order in range(1, _TERMS):
        term = [[value / order for value in row] for row in _product(term, scaled)]
        result = [
            [a + b for a, b in zip(one, other, strict=True)]
            for one, other in zip(result, term, strict=True)
        ]

    for _ in range(halvings):
        result = _product(result, result)

    return result


def _product(left: Matrix, right: Matrix) -> Matrix:
    columns = list(zip(*right, strict=True))
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in columns]
        for row in left
    ]
