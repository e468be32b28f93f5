"""`bunkbed serve` in one process: answers have the bits of the tables, and bad requests an error and no effect."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

import bunkbed as bb  # noqa: E402
import bunkbed.cli  # noqa: E402
from bunkbed.serve import app as app_module  # noqa: E402
from bunkbed.serve.answers import ARROW  # noqa: E402
from bunkbed.serve.app import create_app  # noqa: E402
from bunkbed.serve.labels import LabelIndex  # noqa: E402
from bunkbed.serve.settings import ServeSettings  # noqa: E402
from bunkbed.serve.source import Source  # noqa: E402
from bunkbed.train.data.vocab import Vocab  # noqa: E402
from bunkbed.train.trained import Recommender  # noqa: E402

ROWS, DIM = 50, 3
EVERY = np.arange(ROWS)


class Served:
    """A client of what is served, and its writer."""

    def __init__(self, client: TestClient, source: Source) -> None:
        self.client, self.source = client, source

    def post(self, path: str, *, status: int = 200, accept: str = "*/*", **body: Any) -> Any:
        headers = {"accept": accept, "content-type": "application/json"}
        answer = self.client.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == status, answer.text
        if accept != ARROW:
            return answer.json()
        table = pa.ipc.open_stream(answer.content).read_all()
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        return int(table.schema.metadata[b"version"]), columns

    def error(self, path: str, status: int, **body: Any) -> str:
        found = self.post(path, status=status, **body)
        assert list(found) == ["error"]
        text: str = found["error"]
        return text

    def metrics(self) -> dict[str, float]:
        text = self.client.get("/metrics").text
        return {
            " ".join([sample.name, *map(str, sample.labels.values())]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    opened: list[TestClient] = []

    def start(path: Path, **options: Any) -> Served:
        app = create_app(ServeSettings(str(path), ram=64 << 20, **options))
        client = TestClient(app, raise_server_exceptions=False)
        client.__enter__()  # type: ignore[no-untyped-call]
        opened.append(client)
        return Served(client, app.state.source)

    yield start
    for client in opened:
        client.__exit__(None, None, None)  # type: ignore[no-untyped-call]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[bb.Table]:
    with bb.create(tmp_path / "user", dim=DIM, num_rows=ROWS, seed=5, ram="16MiB") as table:
        table.set(EVERY[:40], np.random.default_rng(0).standard_normal((40, DIM), np.float32))
        table.commit()
        yield table


@pytest.fixture(scope="module", params=["str", "int"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of 40 users and 30 items, whose labels are texts or numbers."""
    folder, rng = tmp_path_factory.mktemp("trained"), np.random.default_rng(1)
    name = "{0}{1}" if request.param == "str" else "7{1}"
    lines = [
        f"{name.format('u', user)},{name.format('i', item)}" for user in range(40) for item in rng.permutation(30)[:6]
    ]
    (folder / "pairs.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as ended:
        bunkbed.cli.main(
            ["train", str(folder / "pairs.csv"), "--out", str(folder / "run"), "--epochs", "2", "--dim", "4"]
        )
    assert ended.value.code == 0
    return folder / "run"


# ---- Answers


def test_rows_have_the_bits_of_the_table(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path)
    ids = [3, 1, 3, 49]  # twice, and one that is not stored
    found = served.post("/lookup", ids=ids)
    assert list(found) == ["version", "id", "row"] and found["version"] == 1 and found["id"] == ids
    assert np.array_equal(np.array(found["row"], np.float32), table.lookup(ids))
    version, columns = served.post("/lookup", accept=ARROW, ids=ids, table="user")
    assert version == 1 and columns["id"].to_pylist() == ids
    rows = columns["row"]
    assert rows.type == pa.list_(pa.float32(), DIM)
    assert np.array_equal(rows.flatten().to_numpy().reshape(-1, DIM), table.lookup(ids))
    assert served.post("/lookup", ids=[]) == {"version": 1, "id": [], "row": []}
    assert served.post("/lookup", accept=ARROW, ids=[])[1]["row"].to_pylist() == []


@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_neighbors_are_those_of_the_table(metric: str, table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path)
    ids, scores = bb.neighbors(table, [7, 2], 4, metric=metric)
    found = served.post("/neighbors", ids=[7, 2], k=4, metric=metric)
    assert found["of"] == [7] * 4 + [2] * 4 and found["rank"] == [1, 2, 3, 4] * 2
    assert found["id"] == ids.reshape(-1).tolist()
    assert np.array_equal(np.array(found["score"], np.float32), scores.reshape(-1))
    every = served.post("/neighbors", ids=[7], k=100)
    assert len(every["id"]) == 39 and 7 not in every["id"]  # all stored rows but itself


def test_a_server_follows_the_writer(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path, max_age_s=0.04)
    for number in range(2, 6):
        table.set(EVERY, np.full((ROWS, DIM), number, np.float32))
        table.commit()
        end = time.monotonic() + 60
        while (found := served.post("/lookup", ids=EVERY.tolist()))["version"] < number:
            assert time.monotonic() < end
        assert np.unique(found["row"]).tolist() == [number]


def test_an_answer_is_of_one_commit(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path, max_age_s=600)
    reader, movers = served.source.reader, list[threading.Thread]()
    lookup = reader.lookup  # type: ignore[union-attr]

    def while_it_moves(*arguments: Any) -> Any:
        table.set(EVERY, np.full((ROWS, DIM), 2, np.float32))
        table.commit()
        movers.append(threading.Thread(target=reader.refresh))
        movers[-1].start()
        movers[-1].join(0.2)  # it waits for the answer
        return lookup(*arguments)

    reader.lookup = while_it_moves  # type: ignore[method-assign, union-attr, assignment]
    found = served.post("/lookup", ids=[1])
    assert found["version"] == 1 and found["row"] != [[2.0] * DIM]
    movers[0].join()
    assert reader.version == 2


def test_recommendations_are_those_of_the_run(run: Path, serve: Callable[..., Served]) -> None:
    served = serve(run)
    with Recommender.load(run) as model:
        users, items = model.users.decode(np.arange(3)), model.items.decode(np.arange(12))
        for options in ({}, {"include_seen": True}, {"items": items}):
            found = served.post("/recommend", users=users, k=4, **options)
            place = 0
            for user in users:
                for rank, (item, score) in enumerate(model.recommend(user, 4, **options), start=1):  # type: ignore[arg-type]
                    assert [found[name][place] for name in ("user", "rank", "item")] == [user, rank, item]
                    assert np.float32(found["score"][place]) == np.float32(score)
                    place += 1
            assert place == len(found["user"]) > 0
        version, columns = served.post("/recommend", accept=ARROW, users=users[:1], k=2)
        best = [item for item, _ in model.recommend(users[0], 2)]
        assert version == model.run.version and columns["item"].to_pylist() == best
        assert served.post("/recommend", users=[])["item"] == []
        twice = served.post("/recommend", users=[users[1], users[0], users[1]], k=1)
        assert twice["user"] == [users[1], users[0], users[1]] and twice["item"][0] == twice["item"][2]
        alone = served.post("/recommend", users=[users[1]], k=1)
        assert alone["item"] == twice["item"][:1] and alone["score"] == twice["score"][:1]  # the same bits with others


def test_rows_and_neighbors_by_label(run: Path, serve: Callable[..., Served]) -> None:
    served = serve(run)
    with Recommender.load(run) as model:
        labels = model.items.decode(np.array([4, 0, 4]))
        found = served.post("/lookup", table="item", labels=labels)
        rows = model.run.table("item").lookup([4, 0, 4])
        assert found["label"] == labels and np.array_equal(np.array(found["row"], np.float32), rows)
        near = served.post("/neighbors", table="item", labels=labels[:1], k=3)
        ids, _ = bb.neighbors(model.run.table("item"), 4, 3)
        assert near["of"] == labels[:1] * 3 and near["label"] == model.items.decode(ids)
        unknown = served.error("/recommend", 404, users=[*model.users.decode([0]), "it's new"])
        assert 'users[1] is "it\'s new", which is not among the 40 known' in unknown
        as_text = served.post("/lookup", table="item", labels=[str(label) for label in labels])
        assert as_text == found  # labels as the run has them
        kind = pa.string() if isinstance(labels[0], str) else pa.int64()
        assert served.post("/lookup", accept=ARROW, table="item", labels=[])[1]["label"].type == kind
        assert served.post("/recommend", accept=ARROW, users=[])[1]["user"].type == kind
    assert "is not among the 40 known" in served.error("/lookup", 404, table="user", labels=[10**20])
    info = served.client.get("/info").json()
    assert info["recommends"] and info["tables"]["item"]["has_labels"] and info["tables"]["item"]["dim"] == 4


def test_a_run_that_was_not_trained_here(tmp_path: Path, serve: Callable[..., Served]) -> None:
    with bb.Run(tmp_path / "run", ram="64MiB") as run:
        for name in ("a", "b"):
            run.table(name, create={"dim": 2, "num_rows": 5, "init": bb.Zeros()}).set(
                [1], np.array([[1, 2]], np.float32)
            )
        run.commit()
    served = serve(tmp_path / "run")
    assert served.post("/lookup", table="b", ids=[1, 0])["row"] == [[1, 2], [0, 0]]
    assert served.error("/lookup", 400, ids=[1]) == "give table, one of a, b"
    assert served.error("/lookup", 404, ids=[1], table="../a") == "there is no table '../a'; there are a, b"
    assert "is no training run" in served.error("/recommend", 404, users=[1])


def test_a_snapshot_is_followed(table: bb.Table, serve: Callable[..., Served]) -> None:
    table.commit(keep="best")
    served = serve(table.path, snapshot="best", max_age_s=0.04)
    table.set(EVERY, np.zeros((ROWS, DIM), np.float32))
    table.commit()
    assert served.source.reader.refresh() == served.post("/lookup", ids=[1])["version"] == 2
    table.commit(keep="best", meta={"new": True})
    served.source.reader.refresh()
    assert served.post("/lookup", ids=[1])["row"] == [[0.0] * DIM]


def test_a_commit_that_is_collected_while_it_is_read(run: Path, serve: Callable[..., Served]) -> None:
    served, times = serve(run), 0
    model = served.source.recommender
    assert model is not None
    best_of = model.best_of

    def collected_at_first(*arguments: Any, **options: Any) -> Any:
        nonlocal times
        times += 1
        if times < 3:
            raise FileNotFoundError("collected")
        return best_of(*arguments, **options)

    model.best_of = collected_at_first  # type: ignore[method-assign]
    user = model.users.decode([0])
    assert len(served.post("/recommend", users=user, k=2)["item"]) == 2 and times == 3
    times = -100
    assert "cannot be read now" in served.error("/recommend", 503, users=user)


# ---- Bad requests

BAD = [
    ("/lookup", {"ids": [1, -2]}, 400, "id -2 at position 1 is outside [0, 50)"),
    ("/lookup", {"ids": [1, ROWS]}, 400, "id 50 at position 1 is outside [0, 50)"),
    ("/lookup", {"ids": [1, 2**63]}, 400, "id 9223372036854775808 at position 1 is no int64"),
    ("/lookup", {"ids": [3, 1.0]}, 422, "ids[1] is 1.0: Input should be a valid integer"),
    ("/lookup", {"ids": [True]}, 422, "ids[0] is True: Input should be a valid integer"),
    ("/lookup", {"ids": ["1"]}, 422, "ids[0] is '1': Input should be a valid integer"),
    ("/lookup", {"ids": 1}, 422, "ids is 1: Input should be a valid list"),
    ("/lookup", {}, 400, "give one of ids and labels"),
    ("/lookup", {"ids": [1], "labels": ["a"]}, 400, "give one of ids and labels"),
    ("/lookup", {"labels": ["a"]}, 400, "the rows of table 'user' have no labels; give ids"),
    ("/lookup", {"ids": [1], "id": [2]}, 422, "there is no field 'id'; there are ids, labels, table"),
    ("/lookup", {"ids": [1], "\ud800": 2}, 422, "unable to parse raw data as a unicode string"),
    ("/lookup", {"ids": [1], "table": "item"}, 404, "there is no table 'item'; there are user"),
    ("/lookup", {"ids": [1] * 21}, 413, "21 ids in one request; the most is 20 (--max-rows)"),
    ("/neighbors", {"ids": [1], "k": 0}, 400, "k must be in [1, 10] (--max-k), got 0"),
    ("/neighbors", {"ids": [1], "k": 11}, 413, "k must be in [1, 10] (--max-k), got 11"),
    ("/neighbors", {"ids": [1], "metric": "l2"}, 422, "metric is 'l2': Input should be 'dot' or 'cosine'"),
    ("/neighbors", {"ids": [45]}, 400, "id 45 at position 0 was never updated or set"),
    ("/recommend", {"users": [1]}, 404, "what is served, 'user', is no training run"),
]


@pytest.mark.parametrize(("path", "body", "status", "part"), BAD)
def test_bad_requests(
    path: str, body: dict[str, Any], status: int, part: str, table: bb.Table, serve: Callable[..., Served]
) -> None:
    served = serve(table.path, max_rows=20, max_k=10)
    assert part in served.error(path, status, **body)
    assert served.post("/lookup", ids=[1])["id"] == [1]  # it goes on


def test_bodies_that_are_no_request(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path, max_body=50_000)
    header = {"content-type": "application/json"}
    for content in (b"", b"{", b"[" * 40_000, b'{"ids": [1' + b"0" * 40_000 + b"]}", b"\xff\xfe", b"null", b"[1]"):
        answer = served.client.post("/lookup", content=content, headers=header)
        assert answer.status_code in (400, 422) and list(answer.json()) == ["error"], (content[:20], answer.text)
    many = served.client.post("/lookup", content=b'{"labels": [' + b"[]," * 15_000 + b"[]]}", headers=header)
    assert many.status_code == 422 and len(many.text) < 200
    assert "labels[0] is []: Input should be an integer or a string" in many.text
    with pytest.raises(ValidationError) as found:
        app_module.LookupBody.model_validate({"labels": [[], [], []]})
    assert found.value.error_count() == 2  # no integer and no string; the other elements are not looked at
    for content in (b"x" * 50_001, (b"x" * 1000 for _ in range(51))):  # with and without a length
        answer = served.client.post("/lookup", content=content, headers=header)
        assert answer.status_code == 413 and "more than 50000 bytes (--max-body)" in answer.json()["error"]
    assert (
        "a JSON object with ids, labels, table; send content-type: application/json"
        in (served.client.post("/lookup", content=b'{"ids": [1]}').json()["error"])
    )
    assert "the body is not JSON, at character 1: " in served.client.post("/lookup", content=b"{", headers=header).text
    refused = served.client.get("/lookup")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    for path in ("/nothing", "/../user/manifest-0000000000000001", "/%2e%2e/etc/passwd"):
        assert served.client.get(path).json() == {"error": "Not Found"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(["ids", "labels", "table", "k", "metric", "users", "include_seen", "items"])


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path = tmp_path_factory.mktemp("fuzzed") / "user"
    with bb.create(path, dim=DIM, num_rows=ROWS, ram="16MiB") as table:
        table.set(EVERY, np.ones((ROWS, DIM), np.float32))
    app = create_app(ServeSettings(str(path), ram=16 << 20))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@given(path=st.sampled_from(["/lookup", "/neighbors", "/recommend"]), body=st.dictionaries(FIELDS, JSON) | JSON)
def test_no_body_is_an_internal_error(fuzzed: TestClient, path: str, body: Any) -> None:
    answer = fuzzed.post(path, json=body)
    assert answer.status_code in (200, 400, 404, 413, 422), answer.text
    assert answer.status_code == 200 or list(answer.json()) == ["error"]


# ---- Limits


def test_a_table_that_is_too_large_to_compare(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path, max_scan=4 * DIM * 40 - 1)
    assert "reads all rows of table 'user', 480 B; the most is 479 B (--max-scan)" in served.error(
        "/neighbors", 413, ids=[1]
    )


def test_values_that_json_cannot_have(table: bb.Table, serve: Callable[..., Served]) -> None:
    with bb.create(table.path.with_name("wide"), dim=2, num_rows=5, ram="16MiB", optimizer=bb.SGD(lr=3e38)) as wide:
        for _ in range(3):
            wide.update([2], np.full((1, 2), 1e38, np.float32))
    served = serve(table.path.with_name("wide"))
    assert "row[1] has a value that JSON cannot have" in served.error("/lookup", 406, ids=[1, 2])
    _, columns = served.post("/lookup", accept=ARROW, ids=[1, 2])
    assert np.isinf(columns["row"].flatten().to_numpy()[2:]).all()


def test_too_many_requests_at_once(table: bb.Table, serve: Callable[..., Served]) -> None:
    served, free, inside = serve(table.path, max_waiting=2), threading.Event(), threading.Semaphore(0)
    lookup, statuses = served.source.lookup, list[int]()

    def slow(*arguments: Any) -> Any:
        inside.release()
        free.wait(60)
        return lookup(*arguments)

    served.source.lookup = slow  # type: ignore[method-assign]

    def ask() -> None:
        statuses.append(served.client.post("/lookup", json={"ids": [1]}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert inside.acquire(timeout=60)
    assert "more than 2 requests at once" in served.error("/lookup", 503, ids=[1])
    assert served.client.get("/healthz").status_code == 200  # a question about health is never refused
    free.set()
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]
    assert served.post("/lookup", ids=[1])["id"] == [1]


def test_a_body_that_does_not_arrive(
    table: bb.Table, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_BODY_S", 0.05)
    limits = app_module._Limits(None, ServeSettings("x"), set(), serve(table.path).client.app.state)  # type: ignore[arg-type, attr-defined]
    sent: list[Any] = []

    async def ask() -> None:
        async def receive() -> Any:
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await limits({"type": "http", "path": "/lookup", "method": "POST"}, receive, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 408 and b"did not arrive within 0.05 s" in sent[1]["body"]


def test_rows_that_may_be_too_old_are_not_served(table: bb.Table, serve: Callable[..., Served]) -> None:
    served, hidden = serve(table.path, max_age_s=0.04), table.path.with_name("hidden")
    assert served.client.get("/healthz").json()["behind"] == 0
    served.client.app.state.source.reader.watch(600)  # type: ignore[attr-defined]
    table.path.rename(hidden)
    try:
        health = served.client.get("/healthz")  # the rows are not too old yet
        assert health.status_code == 200 and health.json()["behind"] is None
        assert math.isnan(served.metrics()["bunkbed_behind"])
        served.client.app.state.source.reader.watch(0.04)  # type: ignore[attr-defined]
        end = time.monotonic() + 60
        while served.source.reader.age_s <= 0.1:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert "cannot be read now" in served.error("/lookup", 503, ids=[1])
        assert served.client.get("/healthz").status_code == 503
        assert served.client.get("/metrics").status_code == 200
    finally:
        hidden.rename(table.path)
    assert served.post("/lookup", ids=[1])["version"] == 1


def test_too_many_comparisons(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path, max_scan=4 * DIM * 40)
    assert len(served.post("/neighbors", ids=[1] * 8, k=1)["id"]) == 8
    assert "with too many others; the most is 8" in served.error("/neighbors", 413, ids=[1] * 9, k=1)


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error", "/secret"), MemoryError(), bb.BunkbedError("/secret")]
)
def test_failures_of_the_machine_are_not_the_clients(
    error: Exception, table: bb.Table, serve: Callable[..., Served]
) -> None:
    served = serve(table.path)

    def fail(*_: Any) -> Any:
        raise error

    served.source.lookup = fail  # type: ignore[method-assign]
    assert served.error("/lookup", 503, ids=[1]) == "the rows cannot be read now; the server's log says why"


def test_a_snapshot_that_was_dropped(table: bb.Table, serve: Callable[..., Served]) -> None:
    table.commit(keep="best")
    served = serve(table.path, snapshot="best", max_age_s=0.04)
    table.drop("best")
    end = time.monotonic() + 60
    while served.source.reader.age_s <= 0.2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "cannot be read now" in served.error("/lookup", 503, ids=[1])
    assert served.client.get("/healthz").status_code == 503


# ---- Metrics and the page


def test_metrics_count_requests_and_rows(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path)
    served.post("/lookup", ids=[1, 2, 45])
    served.post("/lookup", ids=[1, 2])
    served.error("/lookup", 400, ids=[-1])
    served.client.get("/secret/" + "x" * 50)
    found = served.metrics()
    assert found["bunkbed_requests_total /lookup 200"] == 2 and found["bunkbed_requests_total /lookup 400"] == 1
    assert found["bunkbed_requests_total other 404"] == 1 and found["bunkbed_request_seconds_count /lookup"] == 3
    assert found["bunkbed_answer_seconds_count /lookup"] == 2  # those that were found
    assert found["bunkbed_rows_total disk user"] == found["bunkbed_rows_total ram user"] == 2
    assert found["bunkbed_version"] == 1 and found["bunkbed_behind"] == 0 and found["bunkbed_age_seconds"] < 60
    assert found["bunkbed_ram_bytes"] > 10 << 20 and found["bunkbed_ram_budget_bytes"] == 64 << 20
    served.post("/lookup", ids=[1])
    assert served.metrics()["bunkbed_rows_total ram user"] == 3


def test_the_page_describes_every_path(table: bb.Table, serve: Callable[..., Served]) -> None:
    served = serve(table.path)
    assert "swagger" in served.client.get("/docs").text.lower()
    described = served.client.get("/openapi.json").json()
    assert described["info"]["title"] == "Bunkbed: user"  # no path of the server
    paths = described["paths"]
    assert set(paths) == {"/lookup", "/neighbors", "/info", "/healthz", "/metrics"}  # a table recommends nothing
    assert set(paths["/lookup"]["post"]["responses"]) == {"200", "4XX", "422", "503"}
    assert ARROW in paths["/lookup"]["post"]["responses"]["200"]["content"]


# ---- Labels


@pytest.mark.parametrize("labels", [["b", "a", "", "ä", "7"], [5, -3, 2**62, 0]])
@pytest.mark.parametrize("collide", [False, True])
def test_labels_are_found(labels: list[Any], collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if collide:
        monkeypatch.setattr("bunkbed.serve.labels.hash", len, raising=False)
    index = LabelIndex(Vocab.of(labels))
    asked = [*reversed(labels), *labels[:1], "zz", "\ud800", 2**70, "1_0"]
    wanted = [labels.index(label) if label in labels else -1 for label in asked]
    assert index.find(asked).tolist() == wanted
    assert index.find([]).tolist() == []
    if isinstance(labels[0], int):
        assert index.find(["5", " -3 "]).tolist() == [0, 1]  # as in `Vocab.index`
    else:
        assert index.find([7]).tolist() == [4]
