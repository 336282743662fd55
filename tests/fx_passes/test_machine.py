"""Optimized modules under what programs do to modules, in any order, beside the same modules in eager PyTorch.

ZENDNN_CFFI_MACHINE_EXAMPLES=2000 lets it run for longer than the suite does, which always takes the same examples.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.nn.utils import stateless

import zendnn_cffi
from tests.support.changes import IN_PLACE, WAYS, Way, both, net, twin
from tests.support.lowering import noise
from tests.tolerance import assert_close

EXAMPLES = int(os.environ.get("ZENDNN_CFFI_MACHINE_EXAMPLES", "12"))
SEEDS = st.integers(0, 999)
MODES = {"enable_grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
LAYOUTS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "every other": lambda x: torch.cat([x, x], 3)[..., ::2],
    "transposed": lambda x: x.transpose(2, 3),
}
SHAPES = ((2, 3, 6, 6), (1, 3, 5, 7), (3, 3, 1, 1), (2, 3, 6, 4))


def end_where_it_hangs() -> None:
    """Let this process end by a signal, after a minute of computing or half an hour of waiting.

    Whoever measures may freeze processes for minutes: a clock on the wall goes on then.
    """
    signal.setitimer(signal.ITIMER_PROF, 60)
    signal.alarm(1800)


def apart(module: Any) -> None:
    """What load_state_dict() of an optimized module does first: the original keeps its values."""
    if not hasattr(module, "invalidate"):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


def outcome(compute: Callable[[], Tensor]) -> Tensor | type[Exception]:
    """What compute returns, or the kind of error where changes do not go together."""
    try:
        return compute().detach()
    except Exception as error:  # whatever eager raises
        return type(error)


def assert_same(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """The same result, or the same kind of error."""
    expected = outcome(theirs)
    if isinstance(expected, Tensor):
        assert_close(ours().detach(), expected, k=512)
        return
    with pytest.raises(expected):
        ours()


class Machine(RuleBasedStateMachine):
    """`fast` and `oracle` are changed alike, and so are the models that they share storage with."""

    fast: Any
    oracle: Any

    @initialize(seed=SEEDS, example=st.booleans())
    def start(self, seed: int, example: bool) -> None:
        self.model, self.eager = net(seed), net(seed)
        self.fast = zendnn_cffi.optimize(self.model, noise(2, 3, 6, 6) if example else None, tune="off")
        self.oracle = twin(self.eager)
        self.shares = True

    @invariant()
    def call_is_right(self) -> None:
        self.compare(noise(2, 3, 6, 6))

    def compare(self, x: Tensor, mode: str = "no_grad") -> None:
        with MODES[mode]():
            assert_same(lambda: self.fast(x), lambda: self.oracle(x))

    @rule(shape=st.sampled_from(SHAPES), layout=st.sampled_from(sorted(LAYOUTS)), mode=st.sampled_from(sorted(MODES)))
    def call(self, shape: tuple[int, ...], layout: str, mode: str) -> None:
        self.compare(LAYOUTS[layout](noise(*shape)), mode)

    @rule()
    def call_for_a_gradient(self) -> None:
        def gradient(module: Any) -> Tensor:
            x = noise(2, 3, 6, 6).requires_grad_()
            (found,) = torch.autograd.grad(module(x).square().sum(), x)
            return found

        assert_same(lambda: gradient(self.fast), lambda: gradient(self.oracle))

    @rule(way=st.sampled_from(WAYS), seed=SEEDS)
    def change(self, way: Way, seed: int) -> None:
        if way.__name__ == "loaded" and self.shares:
            apart(self.oracle)
            self.shares = False
        both(way, seed, self.fast, self.oracle)

    @rule(way=st.sampled_from(WAYS), seed=SEEDS)
    def change_often(self, way: Way, seed: int) -> None:
        for more in range(3):
            self.change(way, seed + more)
            self.call_is_right()

    @rule(way=st.sampled_from(IN_PLACE), seed=SEEDS)
    def change_the_original(self, way: Way, seed: int) -> None:
        if self.shares:
            both(way, seed, self.model, self.eager)

    @rule(seed=SEEDS, way=st.sampled_from((torch.func.functional_call, stateless.functional_call)))
    def call_functionally(self, seed: int, way: Any) -> None:
        x, generator = noise(2, 3, 6, 6), torch.Generator().manual_seed(seed)
        given = {
            name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
            for name, p in self.oracle.named_parameters()
        }
        with torch.no_grad():
            assert_same(lambda: way(self.fast, given, (x,)), lambda: way(self.oracle, given, (x,)))

    @rule()
    def copy_deeply(self) -> None:
        self.fast, self.oracle = copy.deepcopy(self.fast), copy.deepcopy(self.oracle)
        self.shares = False

    @rule()
    def copy_and_throw_away(self) -> None:
        again = copy.copy(self.fast)
        with torch.no_grad():
            assert_same(lambda: again(noise(2, 3, 6, 6)), lambda: self.oracle(noise(2, 3, 6, 6)))

    @rule()
    def pickle(self) -> None:
        try:
            text = pickle.dumps(self.oracle)
        except Exception:  # parametrized modules refuse
            return
        self.fast, self.oracle = pickle.loads(pickle.dumps(self.fast)), pickle.loads(text)
        self.shares = False

    @rule()
    def call_in_a_thread(self) -> None:
        def ours() -> Tensor:
            with ThreadPoolExecutor(2) as pool:
                first, second = pool.map(self.fast, [noise(2, 3, 6, 4)] * 2)
            assert_close(first.detach(), second.detach(), k=512)
            result: Tensor = first
            return result

        assert_same(ours, lambda: self.oracle(noise(2, 3, 6, 4)))

    @rule()
    def call_in_a_child(self) -> None:
        """A forked process has one thread: OpenMP's others are not there."""

        def ours() -> Tensor:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                end_where_it_hangs()
                torch.set_num_threads(1)
                with torch.no_grad(), os.fdopen(write, "wb") as out:
                    pickle.dump(self.fast(noise(1, 3, 5, 7)).numpy(), out)
                os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as source:
                text = source.read()
            _, status = os.waitpid(child, 0)
            assert status == 0, "the child ended by a signal"
            return torch.from_numpy(pickle.loads(text))

        with torch.no_grad():
            expected = outcome(lambda: self.oracle(noise(1, 3, 5, 7)))
        if isinstance(expected, Tensor):
            assert_close(ours(), expected, k=512)

    @rule()
    def invalidate(self) -> None:
        self.fast.invalidate()

    @rule()
    def clear_the_regions(self) -> None:
        for region in self.fast.regions().values():
            region.clear()

    @rule()
    def optimize_again_and_release(self) -> None:
        """Weights are given up after the first call: later ones are right all the same."""
        model = copy.deepcopy(self.oracle)
        fast = zendnn_cffi.optimize(model.eval(), tune="off", release_weights=True)
        with torch.no_grad():
            for _ in range(2):
                assert_same(lambda: fast(noise(2, 3, 6, 6)), lambda: model(noise(2, 3, 6, 6)))


TestMachine = pytest.mark.filterwarnings("ignore:.*functional_call:FutureWarning")(Machine.TestCase)
TestMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=12, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck), derandomize="ZENDNN_CFFI_MACHINE_EXAMPLES" not in os.environ,
)  # fmt: skip
