"""Schedules: who goes next, and when stores become visible. A pure function of the seed and of what can be done."""

from __future__ import annotations

import random
from dataclasses import dataclass

_CHANGES = 3  # points at which the program that goes first goes last from then on (PCT, Burckhardt et al., ASPLOS 2010)
_HORIZON = 400  # steps within which they lie


@dataclass(frozen=True)
class Action:
    """launch: rank begins its next run. start: a program takes a free slot. step: it goes on to its next shared access.
    deliver: one of its stores becomes visible. card: a rank's network card goes on with a put, number `program`.
    """

    kind: str
    rank: int
    program: int = -1


class Schedule:
    """policy: "random" picks anything; "priorities" lets the first of a random order go on until it waits, and changes
    the order now and then; "rank ahead" prefers ranks in a random order; "late rank" and "starved" hold one rank, or
    one program, back while anything else can go on.

    delivery: stores become visible "at once", at "random" times in any order, or as "late" as a release allows.
    """

    POLICIES = ("random", "priorities", "rank ahead", "late rank", "starved")
    DELIVERIES = ("random", "late", "at once")

    def __init__(self, seed: int, world: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.policy = self.POLICIES[seed % len(self.POLICIES)]
        self.delivery = self.DELIVERIES[seed // len(self.POLICIES) % len(self.DELIVERIES)]
        self.ranks = self.random.sample(range(world), world)
        self.victim = (self.random.randrange(world), self.random.randrange(max(programs, 1)))
        self._changes = sorted(self.random.sample(range(_HORIZON), _CHANGES), reverse=True)
        self._priorities: dict[tuple[int, int], float] = {}
        self._step = 0

    def order(self, programs: int) -> list[int]:
        """The order in which a rank's programs are started: ascending, or any."""
        order = list(range(programs))
        if self.random.random() < 0.5:
            self.random.shuffle(order)
        return order

    def choose(self, actions: list[Action]) -> Action:
        """One of the actions that are possible."""
        self._step += 1
        if self.policy == "priorities":
            return self._by_priority(actions)
        if self.policy == "rank ahead":
            first = min((a.rank for a in actions), key=self.ranks.index)
            actions = [a for a in actions if a.rank == first]
        elif self.policy == "late rank":
            actions = [a for a in actions if a.rank != self.victim[0]] or actions
        elif self.policy == "starved":
            actions = [a for a in actions if (a.rank, a.program) != self.victim] or actions
        return self.random.choice(actions)

    def _by_priority(self, actions: list[Action]) -> Action:
        for action in actions:
            self._priorities.setdefault((action.rank, action.program), self.random.random())
        best = max(actions, key=lambda a: self._priorities[a.rank, a.program])
        if self._changes and self._step >= self._changes[-1]:
            self._changes.pop()
            self._priorities[best.rank, best.program] = -self._step
        return best
