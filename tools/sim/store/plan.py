"""What happens in a run: the shape of the engine, and a list of decisions that clients and faults take.

A plan is data. It is drawn from a seed once, before the run, so a run that fails can be made smaller by leaving
decisions out, and saved and run again without the seed. A fault names the call it strikes by request, rank and number,
not by time, so leaving out another decision does not move it. This file knows no vLLM.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from tools.sim.plans import Decision, Dice
from tools.sim.plans import Plan as AnyPlan

FAULTS: tuple[str, ...] = (
    "late",
    "code",
    "raise",
    "hang",
    "twice",
    "stray",
    "stall",
    "die",
    "lose",
    "evict",
    "pressure",
)
"""Kinds of fault, as `--faults` takes them: a call that is late, fails with a code, raises, hangs until faults stop, or
is answered twice; a report for a job nobody knows; a rank whose transfers stand still; a rank that dies; a message
between scheduler and worker that is lost; keys that the store evicts; a store under pressure."""

CODES: tuple[int, ...] = (
    *(-1, -10, -101, -103, -200, -400, -500, -600, -601, -700, -701, -702, -703, -704, -705, -706, -707, -710, -712),
    *(-800, -900, -1010, -1011, -1100, -1101, -1102, -1103, -1104, -1105, -1106, -1200),
)
"""Every code that Mooncake's store documents."""

STAGES: tuple[str, ...] = ("waiting", "loading", "prefilling", "decoding", "preempted", "storing", "any")
"""Stages of a request at which a client aborts it. `storing`: a job of it is open."""


class Shape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine of a run.

    Attributes:
        layout: the KV-cache groups: `full` (one), `window` (full and sliding-window attention), or `window2` (the same,
            and the window's blocks are half as long), or `states` (full attention and the states of a Mamba model, in
            long blocks within which prefix hits may end).
        striped: the ranks hold identical KV, so each stores a part of the chunks (as with MLA).
        pipelined: the next step is scheduled before the last one's output is known (vLLM's async scheduling).
        runner: vLLM's model runner, 1 or 2: it decides how resumed requests are told to the connector.
        reserve_prompt: a request is admitted only if its whole prompt fits, as is vLLM's default; else preemption is
            more frequent.
        lookups: whether the store is asked for hits; without, a consumer that saves nothing only lends its memory.
        beside: where another connector stands beside the plugin, under vLLM's `MultiConnector`; empty for alone.
        lookup_delay_steps: steps until an asynchronous lookup answers; 0 for lookups that block.
    """

    ranks: int = 1
    blocks: int = 40
    block_size: int = 16
    layout: Literal["full", "window", "window2", "states"] = "full"
    striped: bool = False
    max_seqs: int = 8
    reserve_prompt: bool = True
    max_batched_tokens: int = 128
    pipelined: bool = False
    runner: int = 1
    role: str = "kv_both"
    lookups: bool = True
    beside: Literal["", "first", "second"] = ""
    policy: str = "recompute"
    save_decode_cache: bool = False
    lookup_delay_steps: int = 0
    receivers: int = 1
    on_invariant_violation: str = "raise"
    max_inflight_store_jobs: int = 512
    max_pinned_fraction: float = 0.9
    load_max_retries: int = 2
    load_deadline_s: float = 10.0
    load_rollback: str = "request"
    load_max_cycles: int = 2


class Arrive(Decision, frozen=True, omit_defaults=True, tag="arrive"):
    """A client sends a request: `shared` tokens of a family's prefix, then `own` tokens of its own.

    If the id is still in use, the client waits until it is free: then it comes back in the very step that freed it.
    """

    step: int
    request: str
    family: int
    shared: int
    own: int
    own_seed: int
    max_tokens: int


class Abort(Decision, frozen=True, omit_defaults=True, tag="abort"):
    """A client aborts a request, the first time it is seen in `stage` at or after `step`.

    Attributes:
        mid_step: while the model runs, and not between two steps.
    """

    step: int
    request: str
    stage: str = "any"
    mid_step: bool = False


class Reset(Decision, frozen=True, omit_defaults=True, tag="reset"):
    """An operator resets the prefix cache.

    Attributes:
        running: running requests are preempted for it.
        store: the store is emptied as well.
    """

    step: int
    running: bool = False
    store: bool = False


class CallFault(Decision, frozen=True, omit_defaults=True, tag="call"):
    """The `nth` call of this kind, on this rank, for this request, goes wrong.

    Attributes:
        call: `put`, `get`, `exists` (a save asks which keys are there), or `fence` (a save waits for the GPU).
        fault: `late`, `code`, `raise`, `hang` or `twice`.
        value: steps for `late`, a code for `code`.
        share: how many thousandths of the keys the code strikes.
    """

    call: str
    request: str
    rank: int
    nth: int
    fault: str
    value: int = 0
    share: int = 1000


class Stray(Decision, frozen=True, omit_defaults=True, tag="stray"):
    """A rank reports something that the scheduler does not wait for.

    Attributes:
        what: `unknown` (a job that was never registered), `settled` (a job that has settled), or `load` (a load that
            has).
    """

    step: int
    rank: int
    what: str


class Stall(Decision, frozen=True, omit_defaults=True, tag="stall"):
    """A rank's transfers stand still from `step` for `steps`."""

    step: int
    rank: int
    steps: int


class Die(Decision, frozen=True, omit_defaults=True, tag="die"):
    """A rank's process dies; the engine dies with it, and the log ends torn."""

    step: int
    rank: int


class Lose(Decision, frozen=True, omit_defaults=True, tag="lose"):
    """A rank's message of a step is lost: `up` to the scheduler, `down` to the worker."""

    step: int
    rank: int
    way: str


class Evict(Decision, frozen=True, omit_defaults=True, tag="evict"):
    """The store gives up `share` thousandths of its keys.

    Attributes:
        before_load: for this many steps, do it between a lookup with a hit and the load, instead of once at `step`.
    """

    step: int
    share: int
    before_load: int = 0


class Pressure(Decision, frozen=True, omit_defaults=True, tag="pressure"):
    """The store has no space from `step` for `steps`: puts fail with -200."""

    step: int
    steps: int


AnyDecision: TypeAlias = Arrive | Abort | Reset | CallFault | Stray | Stall | Die | Lose | Evict | Pressure


class Plan(AnyPlan, frozen=True):
    """A run before it happens.

    Attributes:
        seed: what the plan was drawn from; it also decides how long each call takes.
        steps: engine steps until faults stop and clients go home.
        vocabulary: how many different tokens there are.
    """

    seed: int
    steps: int
    shape: Shape
    decisions: tuple[AnyDecision, ...]


def draw(seed: int, steps: int, *, ranks: Sequence[int] = (1, 2, 3, 4), faults: Iterable[str] = FAULTS) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: any whole number.
        steps: engine steps with clients and faults.
        ranks: numbers of ranks to choose from.
        faults: kinds of fault that may happen, of `FAULTS`.
    """
    dice = Dice(seed)
    shape = _draw_shape(dice, ranks)
    allowed = [kind for kind in FAULTS if kind in set(faults)]
    mood = dice.pick(("calm", "light", "light", "heavy", "heavy"))
    kinds = [] if mood == "calm" else [kind for kind in allowed if dice.chance(0.55)]
    arrivals = _draw_arrivals(dice, steps, shape)
    decisions: list[AnyDecision] = [
        *arrivals,
        *_draw_aborts(dice, steps, arrivals),
        *_draw_resets(dice, steps),
        *_draw_call_faults(dice, shape, arrivals, kinds, 0.65 if mood == "heavy" else 0.25),
        *_draw_other_faults(dice, steps, shape, kinds),
    ]
    return Plan(seed, steps, shape, tuple(decisions))


def _draw_shape(dice: Dice, ranks: Sequence[int]) -> Shape:
    layout = dice.pick(("full", "full", "full", "window", "window2", "states"))
    blocks = dice.pick((14, 20, 28, 40, 40, 60))
    saves_decode = dice.chance(0.3)
    return Shape(
        ranks=dice.pick(ranks),
        blocks=blocks * 2 if layout != "full" else blocks,
        layout=layout,
        striped=dice.chance(0.2),
        max_seqs=dice.pick((2, 4, 8, 8)),
        reserve_prompt=dice.chance(0.6),
        max_batched_tokens=dice.pick((32, 64, 128, 256)),
        pipelined=dice.chance(0.35),
        runner=dice.pick((1, 2)),
        role=dice.pick(("kv_both",) * 7 + ("kv_producer", "kv_consumer", "kv_consumer")),
        policy=dice.pick(("recompute", "recompute", "fail")),
        save_decode_cache=saves_decode,
        lookups=dice.chance(0.95),
        beside=dice.pick(("first", "second")) if layout == "full" and dice.chance(0.25) else "",
        lookup_delay_steps=dice.pick((0, 0, 0, 2)),
        receivers=dice.pick((1, 1, 2)),
        on_invariant_violation=dice.pick(("raise", "quarantine")),
        max_inflight_store_jobs=dice.pick((512, 512, 0, 1, 3)),
        max_pinned_fraction=dice.pick((0.9, 0.9, 1.0, 0.5, 0.2)),
        load_max_retries=dice.pick((0, 2, 2)),
        load_deadline_s=dice.pick((10.0, 10.0, 0.2)),
        load_rollback=dice.pick(("request", "request", "suffix")),
        load_max_cycles=dice.pick((2, 2, 1, 0)),
    )


def _draw_arrivals(dice: Dice, steps: int, shape: Shape) -> list[Arrive]:
    capacity_tokens = (shape.blocks - 1) * shape.block_size // (1 if shape.layout == "full" else 3)
    longest = max(shape.block_size, capacity_tokens * dice.between(4, 9) // 10)
    families = dice.between(2, 5)
    talk = dice.pick((1, 1, 3))  # now and then short questions and long answers, which preempt most
    crowd = dice.pick((0.08, 0.15, 0.25, 0.4)) / talk
    arrivals: list[Arrive] = []
    step = 0
    while step < steps * 9 // 10:
        for _ in range(dice.between(1, 4) if dice.chance(0.2) else 1):
            arrivals.append(_draw_request(dice, step, arrivals, families, longest // talk, longest, shape.block_size))
        step += max(1, int(2 * dice.below(1000) / 1000 / crowd))
    return arrivals


def _draw_request(
    dice: Dice, step: int, before: list[Arrive], families: int, longest_prompt: int, longest: int, block_size: int
) -> Arrive:
    request = f"r{len(before)}"
    if before and dice.chance(0.2):
        request = dice.pick(before[-8:]).request
    if before and dice.chance(0.15):  # somebody asks the same again
        same = dice.pick(before)
        return msgspec.structs.replace(same, step=step, request=request)
    max_tokens = dice.pick((1, 3, 8, 20, 40) if longest_prompt == longest else (20, 40, 80, 120))
    room = max(2, min(longest_prompt, longest - max_tokens))
    shared = min(room - 1, dice.below(1 + room // block_size) * block_size)
    own = 1 + dice.below(max(1, min(room - shared, 3 * block_size)))
    return Arrive(
        step=step,
        request=request,
        family=dice.below(families),
        shared=shared,
        own=own,
        own_seed=dice.below(1 << 30),
        max_tokens=min(max_tokens, max(1, longest - shared - own)),
    )


def _draw_aborts(dice: Dice, steps: int, arrivals: list[Arrive]) -> list[Abort]:
    often = dice.pick((0.0, 0.05, 0.2))
    return [
        Abort(
            step=min(steps, arrival.step + dice.below(12)),
            request=arrival.request,
            stage=dice.pick(STAGES),
            mid_step=dice.chance(0.3),
        )
        for arrival in arrivals
        if dice.chance(often)
    ]


def _draw_resets(dice: Dice, steps: int) -> list[Reset]:
    if not dice.chance(0.4):
        return []
    return [
        Reset(step=dice.below(steps), running=dice.chance(0.4), store=dice.chance(0.3))
        for _ in range(dice.between(1, 3))
    ]


def _draw_call_faults(
    dice: Dice, shape: Shape, arrivals: list[Arrive], kinds: list[str], often: float
) -> list[CallFault]:
    per_call = [kind for kind in kinds if kind in ("late", "code", "raise", "hang", "twice")]
    if not per_call:
        return []
    faults: list[CallFault] = []
    for request in dict.fromkeys(arrival.request for arrival in arrivals):
        while dice.chance(often):
            kind = dice.pick(per_call)
            if kind == "twice" and not dice.chance(0.1):  # ends most runs at once, so it must be rare
                continue
            if kind == "hang" and not dice.chance(0.5):
                continue
            calls = {"raise": ("put", "get", "exists", "fence")}.get(kind, ("put", "get"))
            value = {"late": dice.between(3, 60), "code": dice.pick(CODES)}.get(kind, 0)
            faults.append(
                CallFault(
                    call=dice.pick(calls),
                    request=request,
                    rank=dice.below(shape.ranks),
                    nth=dice.pick((0, 0, 1, 2)),
                    fault=kind,
                    value=value,
                    share=dice.pick((1000, 1000, 500, 100)),
                )
            )
    return faults


def _draw_other_faults(dice: Dice, steps: int, shape: Shape, kinds: list[str]) -> list[AnyDecision]:
    faults: list[AnyDecision] = []
    late = steps // 3  # what may end a run comes late, or there would be little to see before it
    for kind in kinds:
        match kind:
            case "stray" if dice.chance(0.3):
                what = dice.pick(("unknown", "settled", "load"))
                faults.append(Stray(late + dice.below(steps - late), dice.below(shape.ranks), what))
            case "stall":
                faults.extend(
                    Stall(dice.below(steps), dice.below(shape.ranks), dice.between(5, 80))
                    for _ in range(dice.between(1, 2))
                )
            case "die" if dice.chance(0.15):
                faults.append(Die(late + dice.below(steps - late), dice.below(shape.ranks)))
            case "lose" if dice.chance(0.3):
                faults.extend(
                    Lose(late + dice.below(steps - late), dice.below(shape.ranks), dice.pick(("up", "down")))
                    for _ in range(dice.between(1, 2))
                )
            case "evict":
                faults.extend(
                    Evict(dice.below(steps), dice.pick((1000, 300, 50)), dice.pick((0, 0, 20, 60)))
                    for _ in range(dice.between(1, 4))
                )
            case "pressure":
                faults.extend(Pressure(dice.below(steps), dice.between(5, 60)) for _ in range(dice.between(1, 2)))
            case _:
                pass
    return faults
