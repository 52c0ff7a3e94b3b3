"""The engine on its own thread, as servers use it: many callers, leaving, refusing, dying, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from loading import llama_folder
from outrider import SamplingParams, Service
from outrider.api.mailbox import Mailbox, Pieces, join
from outrider.api.outputs import Piece
from outrider.errors import CapacityError, OutriderError, PromptTooLongError
from outrider.types import Finish, Traffic

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(10, 30)), list(range(10, 24)), [8, 9] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama_folder(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def service(folder: str) -> Iterator[Service]:
    service = Service(folder, max_model_len=96, backend="reference", max_num_seqs=4, max_waiting=32)
    yield service
    service.close()


async def collect(service: Service, prompt: list[int], params: SamplingParams) -> list[int]:
    return [t async for piece in service.stream(prompt, params) for t in piece.token_ids]


def test_the_service_answers_many_callers_as_alone(service: Service) -> None:
    plain = replace(GREEDY, extra_args={"speculative": False})
    expected = [asyncio.run(collect(service, prompt, plain)) for prompt in PROMPTS]

    async def everybody() -> list[list[int]]:
        return await asyncio.gather(*(collect(service, PROMPTS[i % 4], GREEDY) for i in range(16)))

    assert asyncio.run(everybody()) == [expected[i % 4] for i in range(16)]
    service.check()
    assert service.pending == 0
    assert service.stats()["kv_pages_used"] == 0


def test_leaving_while_a_grammar_compiles_frees_everything(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is accepted after its caller has gone, and ends at once."""
    accept, begun, goes_on, accepted = service._accept, threading.Event(), threading.Event(), threading.Event()

    def slowly(*given: object) -> object:
        begun.set()
        goes_on.wait(10)
        ticket = accept(*given)
        accepted.set()
        return ticket

    monkeypatch.setattr(service, "_accept", slowly)
    params = replace(
        GREEDY, max_tokens=60, structured_outputs={"regex": "[a-z]{200}"}, extra_args={"speculative": False}
    )

    async def leave() -> int:
        task = asyncio.create_task(collect(service, PROMPTS[1], params))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        before = service.stats()["steps"]
        goes_on.set()
        await asyncio.to_thread(accepted.wait, 10)
        while service.pending:
            await asyncio.sleep(0.01)
        return service.stats()["steps"] - before

    assert asyncio.run(asyncio.wait_for(leave(), 20)) < 30  # of 60 tokens
    service.check()


def test_a_mailbox_of_a_closed_loop_keeps_nothing() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    mailbox = Mailbox(loop)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            mailbox.post(Pieces(), Piece("id", 0, "", ()))
    assert not mailbox._letters


def test_leaving_a_stream_of_the_service_frees_everything(service: Service) -> None:
    async def leave() -> None:
        stream = service.stream(PROMPTS[1], replace(GREEDY, max_tokens=60))
        await anext(stream)
        await stream.aclose()
        while service.pending:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 20))
    service.check()
    assert service.stats()["kv_pages_used"] == 0


def test_a_cancelled_task_frees_everything(service: Service) -> None:
    async def cancel() -> None:
        params = replace(GREEDY, max_tokens=60)
        tasks = [asyncio.create_task(collect(service, [5, 6, 7], params)) for _ in range(8)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while service.pending:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancel(), 20))
    service.check()


def test_the_service_refuses_before_it_accepts(service: Service) -> None:
    with pytest.raises(PromptTooLongError):
        asyncio.run(collect(service, [1] * 500, GREEDY))

    async def flood() -> list[object]:
        jobs = [collect(service, [5, 6, 7], GREEDY) for _ in range(40)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    results = asyncio.run(flood())
    refused = [r for r in results if isinstance(r, CapacityError)]
    assert len(refused) == 8
    assert all(isinstance(r, list) for r in results if not isinstance(r, CapacityError))


def test_an_engine_that_dies_leaves_nobody_waiting(folder: str) -> None:
    service = Service(folder, max_model_len=96, backend="reference")

    def explode() -> None:
        raise RuntimeError("scripted failure")

    async def caller() -> list[str]:
        stream = service.stream([5, 6, 7], replace(GREEDY, max_tokens=80, n=2))
        reasons = []
        async for piece in stream:
            service._core.engine.step = explode
            if piece.finish:
                reasons.append(piece.finish.reason)
        return reasons

    assert asyncio.run(asyncio.wait_for(caller(), 20)) == ["error", "error"]
    assert not service.healthy
    with pytest.raises(OutriderError, match="restart"):
        asyncio.run(collect(service, [1], GREEDY))
    service.close()


def test_closing_the_service_ends_open_requests(folder: str) -> None:
    service = Service(folder, max_model_len=96, backend="reference")

    async def caller() -> str | None:
        stream = service.stream([5, 6, 7], replace(GREEDY, max_tokens=80))
        last = await anext(stream)
        closing = asyncio.get_running_loop().run_in_executor(None, service.close)
        async for piece in stream:
            last = piece
        await closing
        return last.finish.reason if last.finish else None

    assert asyncio.run(asyncio.wait_for(caller(), 20)) in ("abort", "length")


def test_a_request_that_comes_while_the_engine_stops_still_ends(folder: str) -> None:
    """The engine thread has ended all it knew of when this request gets its place in the queue."""
    service = Service(folder, max_model_len=96, backend="reference")
    make = service._core.samples

    def late(request):
        service.close()
        return make(request)

    service._core.samples = late

    async def caller() -> list[str | None]:
        return [piece.finish and piece.finish.reason async for piece in service.stream([5, 6, 7], replace(GREEDY, n=2))]

    assert asyncio.run(asyncio.wait_for(caller(), 20)) == ["abort", "abort"]


def count_wakes(loop: asyncio.AbstractEventLoop) -> list[object]:
    """A list that grows by what other threads wake the loop for."""
    woken, call = [], loop.call_soon_threadsafe

    def counted(*arguments: object) -> object:
        woken.append(arguments[0])
        return call(*arguments)

    loop.call_soon_threadsafe = counted
    return woken


def test_a_mailbox_wakes_its_loop_once_for_all_that_is_there() -> None:
    """Posted from other threads, nothing is lost and every receiver keeps its order."""

    async def receive() -> tuple[list[list[int]], int]:
        loop = asyncio.get_running_loop()
        woken = count_wakes(loop)
        box, queues = Mailbox(loop), [Pieces() for _ in range(3)]

        def post(receiver: Pieces) -> None:
            for number in range(500):
                box.post(receiver, Piece("r", number, ""))

        threads = [threading.Thread(target=post, args=(queue,)) for queue in queues]
        for thread in threads:
            thread.start()
        for thread in threads:  # the loop sleeps meanwhile, as behind a long response
            thread.join()
        return [[(await queue.get()).index for _ in range(500)] for queue in queues], len(woken)

    got, woken = asyncio.run(asyncio.wait_for(receive(), 20))
    assert got == [list(range(500))] * 3
    assert 1 <= woken <= 3


def test_pieces_gather_between_the_first_and_the_last() -> None:
    """A paced mailbox wakes its loop for the first and the last piece of a sample, and else when its time is over."""

    async def receive() -> tuple[list[str], list[float], int]:
        loop = asyncio.get_running_loop()
        woken = count_wakes(loop)
        box, pieces = Mailbox(loop, pace=0.3), Pieces()
        start = loop.time()

        def post() -> None:
            for number in range(40):
                box.post(pieces, Piece("r", 0, str(number)))
                time.sleep(0.001)
            time.sleep(0.8)  # the time is over, and the loop sleeps again
            box.post(pieces, Piece("r", 0, "40"))
            ended.append(loop.time() - start)
            box.post(pieces, Piece("r", 0, "41", finish=Finish("stop")))

        ended: list[float] = []
        thread = threading.Thread(target=post)
        thread.start()
        got, times, piece = [], [], Piece("r", 0, "")
        while piece.finish is None:
            piece = await pieces.get()
            got.append(piece.text)
            times.append(loop.time() - start)
        thread.join()
        return got, [*times, ended[0]], len(woken)

    got, times, woken = asyncio.run(asyncio.wait_for(receive(), 20))
    assert "".join(got) == "".join(map(str, range(42)))
    assert got[0] == "0"
    assert len(got) <= 4
    assert times[0] < 0.25
    assert times[1] >= 0.3
    assert times[-2] - times[-1] < 0.25  # the last one does not wait
    assert woken <= 3


def test_pieces_are_joined_where_nothing_is_lost() -> None:
    one, two = Piece("r", 0, "a", ("a",), (1,)), Piece("r", 0, "b", ("b",), (2,), finish=Finish("stop"))
    assert join(one, two) == Piece("r", 0, "ab", ("a", "b"), (1, 2), finish=Finish("stop"))
    drafted = replace(one, drafted=3, accepted=1, drafter="ngram")
    assert join(drafted, two) == replace(drafted, text="ab", texts=("a", "b"), token_ids=(1, 2), finish=two.finish)
    for other in (
        replace(two, index=1),
        replace(two, drafted=1),
        replace(two, accepted=1),
        replace(two, traffic=Traffic()),
    ):
        assert join(one, other) is None


def test_a_paced_mailbox_of_a_loop_that_closes_keeps_nothing() -> None:
    async def begin() -> Mailbox:
        box = Mailbox(asyncio.get_running_loop(), pace=60)
        box.post(pieces, Piece("r", 0, ""))
        await pieces.get()
        return box

    pieces = Pieces()
    box = asyncio.run(begin())
    with pytest.raises(RuntimeError):
        box.post(pieces, Piece("r", 0, ""))
    assert not box._letters
