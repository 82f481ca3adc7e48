"""Charts, several in one picture."""


def draw(path, *charts):
    """charts: (title, {label: {x: y}}, how), how being "line", "log" (of x) or "bar"."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from pandas import DataFrame

    rows, columns = -(-len(charts) // 2), min(2, len(charts))
    figure, grid = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False, layout="constrained")
    for axes, (title, series, how) in zip(grid.flat, charts):
        if how == "bar" and series:
            DataFrame(series).plot.bar(ax=axes, rot=0)
            for bars in axes.containers:
                axes.bar_label(bars, fmt="%.2f", fontsize=8)
        else:
            for label, points in series.items():
                axes.plot(list(points), list(points.values()), "o-" if len(points) < 30 else "-", label=label)
        if how == "log":
            axes.set_xscale("log", base=2)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if series:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
