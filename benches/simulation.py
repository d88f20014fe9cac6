"""The schedule on virtual time: the production batcher and scheduler against given curves and links.

    python -m benches.simulation [--quick] [--seed N]

For each scenario it prints the rate of the automatic policy, the best hand-set plan, plain drain, no batching, and the
analytic bound. Then come a long prompt beside running streams, a stage that slows down, requests that come and go, and
streams that go on after a loss. The last are drafts: with clients that predict their answers, and with a draft model.
Every run is audited (see relayline.deploy.testing.simulation.audit). A broken invariant ends the program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from relayline.deploy.testing.simulation.draft_model import DraftModelFacts
from relayline.deploy.testing.simulation.run import AUTO, DRAIN, SINGLE, Simulation
from relayline.deploy.testing.simulation.scenarios import (
    best_of_sweep,
    burst,
    churn,
    draft_model_gain,
    drafting,
    paused,
    prompt_during_decode,
    slowing,
    steady,
    steady_figures,
    steady_part,
)
from relayline.deploy.testing.simulation.world import (
    CURVES,
    MS,
    StageModel,
    World,
    best_rate,
    equal_stages,
    one_slower,
    streams,
)

STREAMS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
STREAMS_QUICK = (1, 4, 8, 32)
RATE_FLOOR = 0.95  # automatic against the best hand-set plan
DRAFT_FLOOR = 0.92  # with drafts against without, however many of them are wrong
SHARES = (1.0, 0.9, 0.7, 0.3, 0.0)  # of right tokens in predictions
ITL_CEILING = 2.0  # ITL p99 during a prompt compared with quiet

console = Console(width=190)


def scenarios(quick: bool) -> list[tuple[str, tuple[StageModel, ...], int]]:
    """Return (name, stages, one-way link delay)."""
    curves = ("staircase",) if quick else ("staircase", "smooth")
    found = [
        (f"{curve}, {n_stages} equal", equal_stages(n_stages, curve), 0)
        for curve in curves
        for n_stages in ((2, 8) if quick else (2, 4, 8))
    ]
    for curve in curves:
        found.append((f"{curve}, 4, one 3x slower", one_slower(4, 3.0, curve), 0))
        found += [
            (f"{curve}, 2, links {ms} ms", equal_stages(2, curve), ms * MS) for ms in ((10,) if quick else (1, 10))
        ]
        if not quick:
            found.append((f"{curve}, 2, host 1 ms a step", equal_stages(2, curve, host_ns=MS), 0))
    return found


def steady_table(quick: bool) -> float:
    """Print steady streams; returns the worst ratio of automatic to the best hand-set plan."""
    table = Table("scenario", "streams", "plan", "auto tok/s", "best by hand", "auto/best", "bound", "auto/bound",
                  "drain", "single", "overlap", "in use", "ITL ms", "p99", title="steady streams")  # fmt: skip
    worst = 9.0
    for name, stages, link_ns in scenarios(quick):
        for n_streams in STREAMS_QUICK if quick else STREAMS:
            world = steady(stages, n_streams, link_ns=link_ns)
            simulation = Simulation(world, AUTO).run()
            auto = steady_part(simulation)
            plan = simulation.planner.plan(n_streams, n_prompts=0)
            best, by_hand = best_of_sweep(world, 4 if quick else 8)
            bound = best_rate(stages, n_streams, world.overhead_ns)
            worst = min(worst, auto.tokens_per_s / best)
            table.add_row(
                name, str(n_streams), f"{plan.n_groups}x{plan.group_rows}", f"{auto.tokens_per_s:.1f}",
                f"{best:.1f} ({by_hand[0]}x{by_hand[1]})", f"{auto.tokens_per_s / best:.3f}", f"{bound:.1f}",
                f"{auto.tokens_per_s / bound:.2f}", f"{steady_figures(world, DRAIN).tokens_per_s:.1f}",
                f"{steady_figures(world, SINGLE).tokens_per_s:.1f}", f"{auto.overlap:.2f}", f"{auto.utilisation:.2f}",
                f"{auto.itl_mean_ms:.0f}", f"{auto.itl_p99_ms:.0f}",
            )  # fmt: skip
        table.add_section()
    console.print(table)
    return worst


def scale_table(quick: bool) -> None:
    """Print the largest numbers of stages and streams that a plan is used for, next to the analytic bound."""
    table = Table("scenario", "streams", "plan", "auto tok/s", "bound", "auto/bound", "overlap", "in use",
                  "s to simulate", title="many stages, many streams")  # fmt: skip
    # Enough tokens for the groups to have formed by the middle third, which is the part that counts.
    sizes = [(16, 512, 24), (2, 4_096, 6)] if quick else [(64, 64, 12), (64, 256, 12), (16, 512, 24), (2, 4_096, 6)]
    for curve in ("smooth",) if quick else ("staircase", "smooth"):
        for n_stages, n_streams, n_tokens in sizes:
            began_s = time.monotonic()
            world = World(equal_stages(n_stages, curve), streams(n_streams, n_tokens, n_prompt=1))
            simulation = Simulation(world).run()
            auto, bound = steady_part(simulation), best_rate(world.stages, n_streams, 0)
            plan = simulation.planner.plan(n_streams, n_prompts=0)
            table.add_row(
                f"{curve}, {n_stages} equal", str(n_streams), f"{plan.n_groups}x{plan.group_rows}",
                f"{auto.tokens_per_s:.1f}", f"{bound:.1f}", f"{auto.tokens_per_s / bound:.2f}", f"{auto.overlap:.2f}",
                f"{auto.utilisation:.2f}", f"{time.monotonic() - began_s:.1f}",
            )  # fmt: skip
    console.print(table)


def prompt_table(quick: bool) -> float:
    """Print long prompts during decode; returns the worst ratio of ITL p99 to quiet."""
    table = Table("scenario", "streams", "quiet ITL p99 ms", "beside", "ratio", "TTFT s", "alone", "drain ratio",
                  "drain TTFT s", title="a prompt of 2,000 tokens beside running streams")  # fmt: skip
    worst = 0.0
    for curve in ("staircase", "smooth"):
        for n_stages in (2,) if quick else (2, 4, 8):
            for n_streams in (4,) if quick else (1, 4, 16):
                stages = equal_stages(n_stages, curve)
                auto, drain = (prompt_during_decode(stages, n_streams, 2_000, setup=setup) for setup in (AUTO, DRAIN))
                worst = max(worst, auto.itl_p99_ratio)
                table.add_row(
                    f"{curve}, {n_stages}", str(n_streams), f"{auto.quiet.itl_p99_ms:.0f}",
                    f"{auto.during.itl_p99_ms:.0f}",
                    f"{auto.itl_p99_ratio:.2f}", f"{auto.ttft_ms / 1e3:.1f}", f"{auto.ttft_alone_ms / 1e3:.1f}",
                    f"{drain.itl_p99_ratio:.2f}", f"{drain.ttft_ms / 1e3:.1f}",
                )  # fmt: skip
    console.print(table)
    return worst


def change_table(quick: bool, seed: int) -> None:
    """Print a stage that becomes slower, and requests that come, wait, finish and give up."""
    table = Table("scenario", "policy", "tok/s", "TTFT p50 ms", "p99", "ITL mean ms", "p99", "in use", title="change")
    for factor in (3.0,) if quick else (2.0, 3.0, 6.0):
        before_ns, after_ns = 60_000 * MS, 300_000 * MS
        for name, refresh_ns in (("auto, curves refreshed", 1_000 * MS), ("auto, never refreshed", 0)):
            simulation = Simulation(slowing(equal_stages(2), 8, before_ns, factor, refresh_ns=refresh_ns))
            figures = simulation.run(after_ns).audit.figures(2 * before_ns, after_ns)
            table.add_row(
                f"8 streams, first of 2 stages becomes {factor:g}x slower", name, f"{figures.tokens_per_s:.1f}", "", "",
                f"{figures.itl_mean_ms:.0f}", f"{figures.itl_p99_ms:.0f}", f"{figures.utilisation:.2f}",
            )  # fmt: skip
    for curve in ("staircase", "smooth"):
        for policy, setup in (("auto", AUTO), ("drain", DRAIN), ("single", SINGLE)):
            world = churn(equal_stages(4, curve), 60 if quick else 200, seed, link_ns=MS)
            figures = Simulation(world, setup).run().audit.figures()
            table.add_row(
                f"{curve}: joins, leaves, stalls, 4 stages", policy, f"{figures.tokens_per_s:.1f}",
                f"{figures.ttft_p50_ms:.0f}", f"{figures.ttft_p99_ms:.0f}", f"{figures.itl_mean_ms:.0f}",
                f"{figures.itl_p99_ms:.0f}", f"{figures.utilisation:.2f}",
            )  # fmt: skip
    for curve in CURVES:
        for n_streams in (16,) if quick else (4, 16, 32):
            for policy, setup in (("auto", AUTO), ("drain", DRAIN), ("single", SINGLE)):
                world = burst(equal_stages(2, curve), n_streams, 16, 16, link_ns=MS // 2)
                figures = Simulation(world, setup).run().audit.figures()
                table.add_row(
                    f"{curve}: bursts of {n_streams}, 16 tokens after 16, 2 stages", policy,
                    f"{figures.tokens_per_s:.1f}", f"{figures.ttft_p50_ms:.0f}", f"{figures.ttft_p99_ms:.0f}",
                    f"{figures.itl_mean_ms:.0f}", f"{figures.itl_p99_ms:.0f}", f"{figures.utilisation:.2f}",
                )  # fmt: skip
    console.print(table)


def loss_table(quick: bool) -> None:
    """Print how long streams pause after a loss, once all stages are back: their histories are read again."""
    table = Table("scenario", "streams", "policy", "longest pause s", "mean", "ITL p99 until then ms", "all done s",
                  title="paused streams of 200 tokens with 64 to come, 2 stages")  # fmt: skip
    for curve in CURVES:
        for n_streams in (8,) if quick else (4, 8, 16):
            for policy, setup in (("auto", AUTO), ("drain", DRAIN), ("single", SINGLE)):
                simulation = Simulation(paused(equal_stages(2, curve), n_streams, 200, 64), setup).run()
                pauses_ns = [latency_ns for _, latency_ns in simulation.audit.firsts]
                meanwhile = simulation.audit.figures(0, max(pauses_ns))
                table.add_row(
                    curve, str(n_streams), policy, f"{max(pauses_ns) / 1e9:.1f}",
                    f"{sum(pauses_ns) / len(pauses_ns) / 1e9:.1f}", f"{meanwhile.itl_p99_ms:.0f}",
                    f"{simulation.now_ns / 1e9:.1f}",
                )  # fmt: skip
    console.print(table)


def draft_table(quick: bool) -> float:
    """Print the gain of drafts for clients that predict their answers; returns the worst."""
    shares = [f"{share:.0%} right" for share in SHARES]
    table = Table(
        "scenario", "streams", "plain tok/s", *shares, title="gain (guesses a stream) with predictions, 96 tokens"
    )
    worst = 9.0
    for curve in CURVES:
        for n_stages, link_ms in ((2, 0),) if quick else ((2, 0), (2, 10), (4, 0), (4, 10)):
            for n_streams in (1, 4) if quick else (1, 2, 4, 16):
                stages = equal_stages(n_stages, curve)
                found = [drafting(stages, n_streams, share, link_ns=link_ms * MS) for share in SHARES]
                worst = min(worst, *(each.gain for each in found))
                table.add_row(
                    f"{curve}, {n_stages}, links {link_ms} ms", str(n_streams), f"{found[0].plain_per_s:.1f}",
                    *(f"{each.gain:.2f} ({each.n_drafted:.0f})" for each in found),
                )  # fmt: skip
        table.add_section()
    console.print(table)
    return worst


def draft_model_table(quick: bool) -> float:
    """Print the gain of a draft model whose guess takes 2 ms; returns the worst."""
    shares = (0.85, 0.6, 0.2)
    titles = [f"{share:.0%} right" for share in shares]
    table = Table("scenario", "streams", *titles, title="gain of a draft model, 2 ms a guess, 96 tokens")
    worst = 9.0
    for curve in CURVES:
        for n_stages, link_ms in ((2, 0),) if quick else ((1, 0), (2, 0), (2, 10), (4, 0), (4, 10)):
            for n_streams in (1,) if quick else (1, 2, 4):
                stages = equal_stages(n_stages, curve)
                models = [DraftModelFacts(share, 2 * MS) for share in shares]
                found = [draft_model_gain(stages, n_streams, model, link_ns=link_ms * MS) for model in models]
                worst = min(worst, *found)
                scenario = f"{curve}, {n_stages}, links {link_ms} ms"
                table.add_row(scenario, str(n_streams), *(f"{gain:.2f}" for gain in found))
        table.add_section()
    console.print(table)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benches.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small choice of scenarios, some seconds")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers")
    options = parser.parse_args(argv)
    console.print(f"seed {options.seed}")
    began_s = time.monotonic()
    worst_rate = steady_table(options.quick)
    scale_table(options.quick)
    worst_itl = prompt_table(options.quick)
    change_table(options.quick, options.seed)
    loss_table(options.quick)
    worst_gain = min(draft_table(options.quick), draft_model_table(options.quick))
    console.print(
        f"worst automatic/best by hand {worst_rate:.3f} (floor {RATE_FLOOR}), worst ITL p99 beside a prompt "
        f"{worst_itl:.2f}x quiet (ceiling {ITL_CEILING:g}), worst with drafts/without {worst_gain:.3f} (floor "
        f"{DRAFT_FLOOR}), {time.monotonic() - began_s:.0f} s"
    )
    is_good = worst_rate >= RATE_FLOOR and worst_itl <= ITL_CEILING and worst_gain >= DRAFT_FLOOR
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
