"""What happens in a P/D run: the shapes of the engines, and what clients, the network and faults do.

As for the store: data, drawn from a seed once; a fault names what it strikes by request and rank. This file knows no
vLLM.
"""

from typing import Literal, TypeAlias

import msgspec

from tools.sim.plans import Decision, Dice
from tools.sim.plans import Plan as AnyPlan

HEADS = 4
"""KV heads of the model: ranks of tensor parallelism divide it."""

LAYERS = 4
"""Layers of the model: pipeline stages divide it."""

BLOCK_SIZE = 16

PUSH_FAULTS = ("late", "code", "raise", "hang")
REPLY_FAULTS = ("omit", "error", "twice", "unreadable", "stranger", "late", "lost", "break", "takes back", "chatter")
SERVER_FAULTS = ("refuse", "hang", "status", "not JSON")
ADDRESS_FAULTS = ("wrong address", "unknown engine")
FAULTS = (*PUSH_FAULTS, *REPLY_FAULTS, *SERVER_FAULTS, *ADDRESS_FAULTS, "no prefill", "no decode", "retry", "die")
"""Kinds of fault.

A push that is late, fails, raises, or hangs until faults stop; a reply that leaves requests out, is an ERROR, comes
twice, cannot be read, names a stranger, is late, is lost, is lost with its connection, fails a request and then takes
it back, or is lost while others come that say nothing; a bootstrap server that refuses, hangs, answers 500, or
something else than JSON; a router that gives a wrong address or engine, that never prefills, never decodes, or sends a
second decode for a transfer; a process that dies.
"""


class Side(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine: ranks of tensor parallelism, pipeline stages, blocks."""

    tp: int = 1
    pp: int = 1
    blocks: int = 40

    @property
    def ranks(self) -> int:
        """How many workers it has."""
        return self.tp * self.pp


class Shape(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engines of a run.

    Attributes:
        prefills: one or more prefill engines.
        window: full attention and a sliding window beside it: two KV-cache groups.
        policy: `kv_load_failure_policy` of the decode.
    """

    prefills: tuple[Side, ...]
    decode: Side
    window: bool = False
    policy: str = "fail"
    max_seqs: int = 8
    max_batched_tokens: int = 128
    on_invariant_violation: str = "raise"


class Request(Decision, frozen=True, omit_defaults=True, tag="request"):
    """A client's request, which a router sends to a prefill and to the decode.

    Attributes:
        step: when the prefill gets it.
        decode_step: when the decode gets it.
        prefill: which prefill engine.
        shared, own: tokens of a family's prefix, and of its own.
        fault: what the router does wrong: one of `ADDRESS_FAULTS`, `no prefill`, `no decode`, or `retry`.
    """

    step: int
    decode_step: int
    request: str
    prefill: int
    family: int
    shared: int
    own: int
    own_seed: int
    max_tokens: int
    fault: str = ""


class Abort(Decision, frozen=True, omit_defaults=True, tag="abort"):
    """A client goes away: its request is aborted on a side, the first time it is seen there in `stage`."""

    step: int
    request: str
    side: Literal["prefill", "decode"]
    stage: Literal["waiting", "loading", "running", "any"]


class PushFault(Decision, frozen=True, omit_defaults=True, tag="push"):
    """The `nth` push of a request's blocks by a prefill rank goes wrong. `value`: steps, or a code."""

    request: str
    rank: int
    nth: int
    fault: str
    value: int = 0


class ReplyFault(Decision, frozen=True, omit_defaults=True, tag="reply"):
    """The `nth` reply of a prefill rank that answers for a request goes wrong on its way. `value`: steps."""

    request: str
    rank: int
    nth: int
    fault: str
    value: int = 0


class ServerFault(Decision, frozen=True, omit_defaults=True, tag="server"):
    """A prefill's bootstrap server misbehaves from `step` for `steps`."""

    step: int
    steps: int
    prefill: int
    fault: str


class Die(Decision, frozen=True, omit_defaults=True, tag="die"):
    """All processes of an engine are killed: `P0`, `P1` or `D`."""

    step: int
    engine: str


AnyDecision: TypeAlias = Request | Abort | PushFault | ReplyFault | ServerFault | Die


class Plan(AnyPlan, frozen=True):
    """A run before it happens. `steps`: engine steps until faults stop and clients send no more."""

    seed: int
    steps: int
    shape: Shape
    decisions: tuple[AnyDecision, ...]


def draw(seed: int, steps: int, *, faults: tuple[str, ...] = FAULTS) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: any whole number.
        steps: engine steps with clients and faults.
        faults: kinds of fault that may happen, of `FAULTS`.
    """
    dice = Dice(seed)
    shape = _draw_shape(dice)
    mood = dice.pick(("calm", "light", "heavy", "heavy"))
    kinds = [] if mood == "calm" else [kind for kind in faults if dice.chance(0.5)]
    requests = _draw_requests(dice, steps, shape, kinds)
    decisions: list[AnyDecision] = [
        *requests,
        *_draw_aborts(dice, steps, requests),
        *_draw_transfer_faults(dice, shape, requests, kinds, 0.5 if mood == "heavy" else 0.2),
        *_draw_engine_faults(dice, steps, shape, kinds),
    ]
    return Plan(seed, steps, shape, tuple(decisions))


def _draw_shape(dice: Dice) -> Shape:
    def side() -> Side:
        return Side(dice.pick((1, 1, 2, 4)), dice.pick((1, 1, 2, 4)), dice.pick((24, 40, 60)))

    window = dice.chance(0.25)
    decode, prefills = side(), [side() for _ in range(dice.pick((1, 1, 2)))]
    if window:
        decode, *prefills = [msgspec.structs.replace(each, blocks=each.blocks * 2) for each in (decode, *prefills)]
    return Shape(
        prefills=tuple(prefills),
        decode=decode,
        window=window,
        policy=dice.pick(("fail", "recompute")),
        max_seqs=dice.pick((2, 4, 8)),
        max_batched_tokens=dice.pick((64, 128, 256)),
    )


def _draw_requests(dice: Dice, steps: int, shape: Shape, kinds: list[str]) -> list[Request]:
    smallest = min(side.blocks for side in (shape.decode, *shape.prefills))
    longest = (smallest - 1) * BLOCK_SIZE // (3 if shape.window else 1) // 2
    wrong = [kind for kind in kinds if kind in (*ADDRESS_FAULTS, "no prefill", "no decode", "retry")]
    requests: list[Request] = []
    step = 0
    while step < steps * 8 // 10:
        max_tokens = dice.pick((1, 3, 8, 20))
        shared = dice.below(4) * BLOCK_SIZE
        length = max(2, dice.below(longest - max_tokens - shared))
        requests.append(
            Request(
                step=step,
                decode_step=max(0, step + dice.pick((-3, 0, 0, 1, 4, 8))),
                request=f"r{len(requests)}",
                prefill=dice.below(len(shape.prefills)),
                family=dice.below(3),
                shared=shared,
                own=length,
                own_seed=dice.below(1 << 30),
                max_tokens=max_tokens,
                fault=dice.pick(wrong) if wrong and dice.chance(0.2) else "",
            )
        )
        step += 0 if dice.chance(0.25) else dice.between(2, 14)
    return requests


def _draw_aborts(dice: Dice, steps: int, requests: list[Request]) -> list[Abort]:
    often = dice.pick((0.0, 0.1, 0.25))
    aborts: list[Abort] = []
    for request in requests:
        if dice.chance(often):
            side = dice.pick(("prefill", "decode", "decode"))
            begun = request.step if side == "prefill" else request.decode_step
            stage = dice.pick(("waiting", "loading", "loading", "running", "any"))
            aborts.append(Abort(min(steps - 1, begun + dice.below(6)), request.request, side, stage))  # type: ignore[arg-type]
    return aborts


def _draw_transfer_faults(
    dice: Dice, shape: Shape, requests: list[Request], kinds: list[str], often: float
) -> list[AnyDecision]:
    pushes = [kind for kind in kinds if kind in PUSH_FAULTS]
    replies = [kind for kind in kinds if kind in REPLY_FAULTS]
    faults: list[AnyDecision] = []
    for request in requests:
        ranks = shape.prefills[request.prefill].ranks
        while pushes and dice.chance(often / 2):
            value = dice.between(2, 40)
            faults.append(PushFault(request.request, dice.below(ranks), dice.pick((0, 0, 1)), dice.pick(pushes), value))
        while replies and dice.chance(often / 2):
            value = dice.between(2, 40)
            faults.append(
                ReplyFault(request.request, dice.below(ranks), dice.pick((0, 0, 1)), dice.pick(replies), value)
            )
    return faults


def _draw_engine_faults(dice: Dice, steps: int, shape: Shape, kinds: list[str]) -> list[AnyDecision]:
    faults: list[AnyDecision] = [
        ServerFault(dice.below(steps), dice.between(5, 60), dice.below(len(shape.prefills)), kind)
        for kind in kinds
        if kind in SERVER_FAULTS and dice.chance(0.5)
    ]
    if "die" in kinds and dice.chance(0.4):
        engine = dice.pick(("D", *(f"P{index}" for index in range(len(shape.prefills)))))
        faults.append(Die(steps // 4 + dice.below(steps // 2), engine))
    return faults
