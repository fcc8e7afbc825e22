"""Values of charts that pages show next to the cursor; `hover.js` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_HOVER_POINTS = 200  # maximum points of a curve; longer curves are thinned


class HoverPoint(NamedTuple):
    """A point of a chart at (x, y) in data coordinates, with the `title` and the `value` that its tooltip shows."""

    x: float
    y: float
    title: str
    value: str


class HoverSeries(NamedTuple):
    """The points of a curve; `name` and `colour` are those of its legend."""

    name: str
    colour: str
    points: Sequence[HoverPoint]


@dataclass(frozen=True)
class HoverValues:
    """The values of a chart. A tooltip shows the nearest point (`by="point"`), or the point of each curve at the x
    coordinate of the cursor (`by="x"`)."""

    axes: Axes
    series: Sequence[HoverSeries]
    by: Literal["x", "point"] = "x"

    def to_json(self, figure: Figure) -> str:
        """Return the points in units of the figure's SVG: 1/72 inch from the top left corner.

        Call it after the figure was saved, because saving sets the limits of the axes.
        """
        height = 72 * figure.get_figheight()
        series = []
        for name, colour, points in self.series:
            finite = [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]
            stride = math.ceil(len(finite) / MAX_HOVER_POINTS) or 1
            thinned = finite[:-1:stride] + finite[-1:]
            rows = []
            for point in thinned:
                x, y = self.axes.transData.transform((point.x, point.y)) * 72 / figure.dpi
                rows.append([round(float(x), 1), round(float(height - y), 1), point.title, point.value])
            series.append({"name": name, "colour": colour, "points": rows})
        return json.dumps({"by": self.by, "series": series}, ensure_ascii=False)
