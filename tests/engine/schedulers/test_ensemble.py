"""Ensembles: what flows where, what runs beside what, who is blamed, and that nothing stays held."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fastserve.engine.engine import scheduler_of
from fastserve.engine.schedulers.ensemble import EnsembleScheduler, check_models, make_plan
from fastserve.errors import Kind, ServeError
from fastserve.request import InferRequest
from tests.engine.fakes import House, array, ints, io, model_config, run


def step(model, inputs, outputs, version=-1):
    return {"model_name": model, "model_version": version, "input_map": inputs, "output_map": outputs}


def config(steps, inputs=("X",), outputs=("Y",), **more):
    return {
        "input": [io(name) if isinstance(name, str) else name for name in inputs],
        "output": [io(name) for name in outputs],
        "max_batch_size": 8,
        "ensemble_scheduling": {"step": steps},
        **more,
    }


def plan_of(name, triton):
    options = model_config(triton).options.ensemble
    assert options is not None
    return make_plan(name, options)


def put_ensemble(house, triton, name="ens"):
    plan = plan_of(name, triton)
    version = house.put(name, triton, EnsembleScheduler(plan))
    check_models(version, plan, house.catalog)
    return version


def arithmetic():
    house = House()
    house.model("double", [io("a")], [io("b")], lambda x: {"b": x["a"] * 2})
    house.model("add", [io("a"), io("b")], [io("c")], lambda x: {"c": x["a"] + x["b"]})
    return house


async def ask(house, version, outputs=(), **inputs):
    response = await house.engine.infer(
        version, InferRequest({n: ints(v) for n, v in inputs.items()}, outputs)
    )
    found = {name: array(tensor).ravel().tolist() for name, tensor in response.outputs.items()}
    response.release()
    return found


def test_branches_join():
    async def work():
        house = arithmetic()
        ens = put_ensemble(
            house,
            config(
                [
                    step("add", {"a": "L", "b": "R"}, {"c": "Y"}),  # written first, runs last
                    step("double", {"a": "X"}, {"b": "L"}),
                    step("double", {"a": "X2"}, {"b": "R"}),
                ],
                inputs=("X", "X2"),
            ),
        )
        assert await ask(house, ens, X=3, X2=4) == {"Y": [14]}
        assert house.all_released()

    run(work())


def test_branches_run_side_by_side():
    async def work():
        house, seen = House(), []

        async def meet(x):
            seen.append("in")
            while len(seen) < 2:
                await asyncio.sleep(0)
            return {"b": x["a"]}

        house.model("meet", [io("a")], [io("b")], meet)
        steps = [step("meet", {"a": "X"}, {"b": "Y"}), step("meet", {"a": "X"}, {"b": "Z"})]
        ens = put_ensemble(house, config(steps, outputs=("Y", "Z")))
        assert await ask(house, ens, X=5) == {"Y": [5], "Z": [5]}
        assert house.all_released()

    run(work())


def test_only_wanted_outputs_and_ensembles_within():
    async def work():
        house = arithmetic()
        put_ensemble(house, config([step("double", {"a": "X"}, {"b": "Y"})]), "inner")
        outer = put_ensemble(
            house,
            config(
                [step("inner", {"X": "X"}, {"Y": "M"}), step("inner", {"X": "M"}, {"Y": "Y"})],
                outputs=("M", "Y"),
            ),
            "outer",
        )
        assert await ask(house, outer, ("Y",), X=1) == {"Y": [4]}
        assert await ask(house, outer, X=1) == {"M": [2], "Y": [4]}
        assert house.all_released()

    run(work())


def test_optional_inputs_may_stay_away():
    async def work():
        house = House()
        inputs = [io("a"), io("b", optional=True)]
        house.model("add", inputs, [io("c")], lambda x: {"c": x["a"] + x.get("b", np.int32(100))})
        ens = put_ensemble(
            house,
            config([step("add", {"a": "X", "b": "O"}, {"c": "Y"})], inputs=("X", io("O", optional=True))),
        )
        assert await ask(house, ens, X=1) == {"Y": [101]}
        assert await ask(house, ens, X=1, O=2) == {"Y": [3]}
        with pytest.raises(ServeError, match="input 'X' is missing"):
            await ask(house, ens, O=2)
        with pytest.raises(ServeError, match="unexpected inference input 'Q' for model 'ens'"):
            await ask(house, ens, X=2, Q=2)

    run(work())


def test_a_failing_step_is_named_and_stops_the_others():
    async def work():
        house = arithmetic()
        stopped = asyncio.Event()

        async def hang(x):
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        async def fail(x):
            await asyncio.sleep(0)
            raise ServeError(Kind.INTERNAL, "kaboom")

        house.model("hang", [io("a")], [io("b")], hang)
        house.model("fail", [io("a")], [io("b")], fail)
        steps = [
            step("double", {"a": "X"}, {"b": "D"}),
            step("hang", {"a": "D"}, {"b": "Y"}),
            step("fail", {"a": "D"}, {"b": "Z"}),
        ]
        ens = put_ensemble(house, config(steps, outputs=("Y", "Z")))
        with pytest.raises(ServeError) as caught:
            await ask(house, ens, X=1)
        assert (caught.value.kind, caught.value.message) == (Kind.INTERNAL, "in ensemble 'ens', kaboom")
        assert stopped.is_set()
        assert house.all_released()
        await scheduler_of(ens).drain()

    run(work())


def test_cancelling_crosses_steps():
    async def work():
        house = arithmetic()
        entered, left = asyncio.Event(), asyncio.Event()

        async def hang(x):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        house.model("hang", [io("a")], [io("b")], hang)
        ens = put_ensemble(
            house, config([step("double", {"a": "X"}, {"b": "D"}), step("hang", {"a": "D"}, {"b": "Y"})])
        )
        asking = asyncio.ensure_future(ask(house, ens, X=1))
        await entered.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert left.is_set()
        assert house.all_released()
        await scheduler_of(ens).drain()

    run(work())


def test_a_model_that_leaves_out_a_tensor():
    async def work():
        house = House()
        house.model("none", [io("a")], [io("b"), io("c")], lambda x: {"c": x["a"]})
        ens = put_ensemble(house, config([step("none", {"a": "X"}, {"b": "Y"})]))
        with pytest.raises(ServeError, match="in ensemble 'ens', unexpected deadlock") as fault:
            await ask(house, ens, X=1)
        assert fault.value.kind is Kind.INVALID_ARGUMENT  # as in Triton
        assert house.all_released()

    run(work())


def test_a_model_that_went_away_is_said_so_and_closing_ends_the_waiting():
    async def work():
        house = arithmetic()
        entered = asyncio.Event()

        async def hang(x):
            entered.set()
            await asyncio.Event().wait()

        house.model("hang", [io("a")], [io("b")], hang)
        ens = put_ensemble(house, config([step("hang", {"a": "X"}, {"b": "Y"})]))
        asking = asyncio.ensure_future(ask(house, ens, X=1))
        await entered.wait()
        scheduler_of(ens).close()
        with pytest.raises(ServeError, match="the model version was unloaded"):
            await asking
        with pytest.raises(ServeError):
            await ask(house, ens, X=1)

    run(work())


def test_max_inflight_requests_of_each_step():
    async def work():
        house, most, now = House(), 0, 0

        async def count(x):
            nonlocal most, now
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            return {"b": x["a"]}

        house.model("count", [io("a")], [io("b")], count)
        triton = config([step("count", {"a": "X"}, {"b": "Y"})])
        triton["ensemble_scheduling"]["max_inflight_requests"] = 2
        ens = put_ensemble(house, triton)
        await asyncio.gather(*(ask(house, ens, X=i) for i in range(6)))
        assert most == 2

    run(work())


DOUBLE = step("double", {"a": "X"}, {"b": "Y"})


@pytest.mark.parametrize(
    ("triton", "text"),
    [
        (config([]), "must specify 'step' for ensemble 'e'"),
        (config([step("", {"a": "X"}, {"b": "Y"})]), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (config([DOUBLE, step("m", {}, {"b": "Y"})]), "must specify 'input_map' in step 1 of ensemble 'e'"),
        (config([step("m", {"a": "X"}, {})]), "must specify 'output_map' in step 0 of ensemble 'e'"),
        (
            config([DOUBLE, DOUBLE]),
            "ensemble tensor 'Y' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (config([step("m", {"a": "Z"}, {"b": "Y"})]), "ensemble input 'X' for ensemble e' is not used"),
        (config([step("m", {"a": "X"}, {"b": "Z"})]), "ensemble output 'Y' for ensemble e' is not used"),
        (
            config([step("m", {"a": "X", "b": "Q"}, {"c": "Y"}), step("m", {"a": "Y"}, {"c": "Q"})]),
            "output 'Y' for ensemble 'e' is not written",
        ),
        (
            config([DOUBLE, step("m", {"a": "X"}, {"b": "U"})]),
            "ensemble tensor 'U' is unused in ensemble 'e'",
        ),
    ],
)
def test_plans_that_do_not_flow(triton, text):
    with pytest.raises(ServeError) as caught:
        plan_of("e", triton)
    assert (caught.value.kind, caught.value.message) == (Kind.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("triton", "text"),
    [
        (
            config([step("no", {"a": "X"}, {"b": "Y"})]),
            "ensemble 'e' depends on 'no' which has no loaded version",
        ),
        (
            config([step("double", {"a": "X"}, {"b": "Y"}, version=7)]),
            "ensemble 'e' depends on 'double' whose required version 7 is not loaded",
        ),
        (
            config([step("double", {"q": "X"}, {"b": "Y"})]),
            "in ensemble e, ensemble tensor X is mapping to non-existing input q in model double",
        ),
        (
            config([step("double", {"a": "X"}, {"q": "Y"})]),
            "in ensemble e, ensemble tensor Y is mapped from non-existing output q in model double",
        ),
        (
            config([step("add", {"a": "X"}, {"c": "Y"})]),
            "in ensemble e, input b in model add is not mapped to any ensemble tensors",
        ),
        (
            config([DOUBLE], inputs=(io("X", kind="TYPE_FP32"),)),
            "in ensemble e, ensemble tensor X: inconsistent data type: TYPE_FP32 is inferred from model e "
            "while TYPE_INT32 is inferred from model double",
        ),
        (
            config([DOUBLE], inputs=(io("X", 2),)),
            "in ensemble e, ensemble tensor X: inconsistent shape: [-1,2] is inferred from model e "
            "while [-1,1] is inferred from model double",
        ),
        (
            config([DOUBLE], max_batch_size=16),
            "ensemble e allows maximum batch size 16, but it contains model double "
            "which only allows maximum batch size to be 8",
        ),
        (config([step("e", {"X": "X"}, {"Y": "Y"})]), "circular dependency between ensembles: e -> e"),
    ],
)
def test_models_that_do_not_fit(triton, text):
    house = arithmetic()
    with pytest.raises(ServeError) as caught:
        put_ensemble(house, triton, "e")
    assert (caught.value.kind, caught.value.message) == (Kind.INVALID_ARGUMENT, text)


def test_ensembles_in_a_circle():
    house = arithmetic()
    triton = config([step("two", {"X": "X"}, {"Y": "Y"})])
    house.put("one", triton, None)
    with pytest.raises(ServeError, match=r"between ensembles: two -> \.\.\. -> one -> two"):
        put_ensemble(house, config([step("one", {"X": "X"}, {"Y": "Y"})]), "two")
