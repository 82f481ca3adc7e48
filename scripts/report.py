"""report.md and its picture: what a draft is worth, from results.json alone."""
import stage


def write(results, out):
    draw(results, out / "acceptance.png")
    stage.write(out / "report.md", text(results))


def text(results):
    settings = results["settings"]
    head = "| prompts | acceptance length | by position | tokens/s plain | with draft | speed-up | identical |\n|---|---|---|---|---|---|---|\n"
    lines = [f"| {name} ({r['prompts']}) | **{r['acceptance_length']:.2f}** | {' / '.join(f'{a:.2f}' for a in r['acceptance_by_position'])} | "
             f"{r['tokens_per_s_baseline']:.0f} | {r['tokens_per_s']:.0f} | {r['speedup']:.2f} | {r['identical_outputs']:.0%} |"
             for name, r in {**results["sets"], "all": results}.items()]
    verdict = ("Serve with this draft: it is faster." if results["speedup"] > 1.02 else
               f"Do not serve with this draft here: at {settings['concurrency']} requests in flight it gains no speed.")
    walked = "The target does not fit in this machine's memory twice, so the answers were not walked with the trainer's model."
    if results["walked"] != "not run":
        names = {"trained": "this draft, by the trainer's model", "untrained": "an untrained draft",
                 "most_frequent_token": "the most frequent token, always"}
        walked = ("The same greedy answers, walked offline (acceptance length):\n\n| draft | " + " | ".join(results["sets"])
                  + " |\n|---|" + "---|" * len(results["sets"]) + "\n"
                  + "\n".join(f"| {names[draft]} | " + " | ".join(f"{by_set[s]:.2f}" for s in results["sets"]) + " |"
                              for draft, by_set in results["walked"].items())
                  + "\n\nThe first line must agree with what the server measured above.")
    return (f"# Draft evaluation\n\n{verdict}\n\n{head}" + "\n".join(lines) + "\n\n![acceptance by position](acceptance.png)\n\n"
            f"Acceptance length: 1 + accepted proposals per verification (the target's own token included). {settings['engine']}, "
            f"{settings['dtype']}, {settings['steps']} proposals, top-k {settings['top_k']}, temperature 0, at most "
            f"{settings['max_tokens']} tokens, {settings['concurrency']} requests in flight.\n\n{walked}\n")


def draw(results, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    width = 0.8 / len(results["sets"])
    for i, (name, r) in enumerate(results["sets"].items()):
        places = [k + i * width for k in range(1, 1 + len(r["acceptance_by_position"]))]
        bars = axes.bar(places, r["acceptance_by_position"], width, align="edge", label=f"{name}: {r['acceptance_length']:.2f}")
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set(xlabel="proposal", ylabel="accepted up to it, of all verifications", ylim=(0, 1), xticks=[1.4, 2.4, 3.4],
             xticklabels=["1", "2", "3"])
    axes.legend(title="acceptance length")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
