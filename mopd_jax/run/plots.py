"""Figures of reports, as PNG files; the same numbers give the same file."""

from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath
from matplotlib import colormaps
from matplotlib.figure import Figure

from mopd_jax.run.scores import SHARES, Interval

WINDOW = 5
"""Steps over which a thick curve is a mean."""

Curves = Mapping[str, Sequence[np.ndarray]]
"""Phase → one curve [steps] per run."""


def plot_differences(
    path: epath.PathLike, differences: Mapping[tuple[str, str], Interval], metric: str, title: str
) -> None:
    """Draws every difference with its interval, one line each, the first at the top.

    Args:
      path: of the PNG file.
      differences: (ours, theirs) → ours − theirs.
      metric: what differs; a share is drawn in points.
      title: name of the metric with its unit.
    """
    scale = 100 if metric in SHARES else 1
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(differences)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="0.6", linewidth=1)
    for height, interval in enumerate(differences.values()):
        axes.plot([scale * interval.low, scale * interval.high], [height, height], color="tab:blue")
        axes.plot(scale * interval.difference, height, "o", color="tab:blue", markersize=4)
    axes.set_yticks(range(len(differences)), [f"{ours} − {theirs}" for ours, theirs in differences])
    axes.invert_yaxis()
    axes.set_xlabel(f"difference in {title}, 95 % interval")
    _save(figure, path)


def plot_curves(path: epath.PathLike, panels: Mapping[str, Curves]) -> None:
    """Draws one panel for each quantity over training steps, in it one colour for each phase.

    Single runs are thin; the thick line is their mean over `WINDOW` steps around each.

    Args:
      path: of the PNG file.
      panels: quantity → its curves.
    """
    figure = Figure(figsize=(8, 1 + 2.8 * len(panels)), layout="constrained")
    every_axes = figure.subplots(len(panels), squeeze=False).flat
    for axes, (quantity, curves) in zip(every_axes, panels.items(), strict=True):
        for number, (phase, runs) in enumerate(curves.items()):
            color = colormaps["tab20"](number % 20)
            for run in runs:
                axes.plot(np.arange(1, len(run) + 1), run, color=color, linewidth=0.5, alpha=0.4)
            mean = smoothed(np.mean(runs, axis=0))
            axes.plot(np.arange(1, len(mean) + 1), mean, color=color, label=phase)
        axes.set_ylabel(quantity)
        axes.set_xlabel("step")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    _save(figure, path)


def smoothed(curve: np.ndarray) -> np.ndarray:
    """Returns the mean over `WINDOW` steps around each step, fewer at the ends, of a curve [steps]."""
    half = WINDOW // 2
    return np.array([curve[max(0, n - half) : n + half + 1].mean() for n in range(len(curve))])


def _save(figure: Figure, path: epath.PathLike) -> None:
    with epath.Path(path).open("wb") as file:
        figure.savefig(file, dpi=110)
