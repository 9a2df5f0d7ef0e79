"""What tests of the lens on live engines have in common: a trained oracle, and a look that must hold in every state."""

from oracle import Oracle
from sharded import assert_equal
from torch import optim

from shardglass import Snapshot, look, state_of, where
from shardglass.layout import locate


def steady_adamw(groups):
    """AdamW whose eps is above the rounding of gradients that are zero in exact arithmetic (key biases)."""
    return optim.AdamW(groups, lr=1e-3, eps=1e-5, foreach=False)


def two_groups(named):
    """Matrices with decay, the rest without, as the Transformers Trainer has them."""
    matrices = [p for _, p in named if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def steady_look(model, optimizer=None, **given) -> Snapshot:
    """A look that finds memory as the layout says, survives JSON, and gives the same twice."""
    snapshot = look(model, optimizer, **given)
    assert [str(fault) for fault in snapshot.check()] == []
    again = Snapshot.from_json(snapshot.to_json())
    assert again == snapshot
    assert again.diff(look(model, optimizer, **given)) == ()
    return snapshot


def gradients_of(model, optimizer, oracle: Oracle) -> dict:
    """The gradient of every trained parameter, whole; collective."""
    return {name: state_of(model, name, optimizer)["grad"].float() for name in oracle.trained}


def states_of(model, optimizer, oracle: Oracle, *, master: str) -> dict:
    """Masters and optimizer states in the oracle's form; collective.

    Args:
        model: As ``look`` takes it.
        optimizer: As ``look`` takes it.
        oracle: Names the parameters.
        master: The kind that the optimizer updates: "master", or "param" where there is no other.
    """
    found = {}
    for name in oracle.trained:
        for kind, value in state_of(model, name, optimizer).items():
            if kind == master:
                found[f"{name}|master"] = value.float()
            elif kind not in ("param", "grad", "step"):
                found[f"{name}|{kind}"] = value
    return found


def assert_trained_as(model, optimizer, oracle: Oracle, *, master: str, tolerance: float) -> None:
    """Every master weight and state is the oracle's; collective."""
    assert_equal(states_of(model, optimizer, oracle, master=master), oracle.states(), tolerance)


def assert_where_agrees(model, optimizer, snapshot: Snapshot, names) -> None:
    """What ``where`` says is what the layout says, element by element at the ends of every run."""
    for name in names:
        found = where(model, name, optimizer)
        assert found.holdings, name
        for kind, cut in {(h.kind, h.cut) for h in found.holdings}:
            runs = [h for h in found.holdings if (h.kind, h.cut) == (kind, cut)]
            numel = snapshot.layout.spec(name).numel
            covered = sorted((h.start, h.stop) for h in runs)
            assert covered[0][0] == 0
            assert covered[-1][1] == numel
            assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))
        for h in found.holdings:
            for element in (h.start, h.stop - 1):
                if h.cut:
                    place = locate(snapshot.layout, name, element)
                    assert place.rank in range(*h.ranks)
                    assert place.offset == h.offset + element - h.start
            assert (h.attribute is not None) == (snapshot.rank in range(*h.ranks))


def kinds(chain) -> list[str]:
    return [link.kind for link in chain]
