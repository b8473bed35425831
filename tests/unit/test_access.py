"""Callers, their keys, roles and limits, and the file that names them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.access.bucket import TokenBucket
from headrace.access.caller import Caller, Grant, Limits, Role
from headrace.access.table import AccessError, AccessTable, key_hash
from headrace_protocol.errors import ErrorDetail, InferError

S = 1_000_000_000
KEY = "a-key-of-some-length"


def table(tmp_path, text, now=lambda: 0, today=None):
    file = tmp_path / "access.yaml"
    file.write_text(text)
    return AccessTable(str(file), now, today)


def refusal(caller, model="m", now=0):
    with pytest.raises(InferError) as caught:
        caller.begin(model, now)
    return caught.value


def team(key=KEY, extra=""):
    return f"callers:\n- name: team\n  roles: [infer]\n  keys: [{key_hash(key)}]\n{extra}"


class TestBuckets:
    def test_a_burst_is_there_at_once_and_then_the_rate_counts(self):
        bucket = TokenBucket(2, 3, 0)
        assert [bucket.take(1, 0) for _ in range(4)] == [0, 0, 0, 0.5]
        assert bucket.take(1, S // 2) == 0
        assert bucket.take(1, S // 2) == 0.5

    def test_debts_are_paid_off_first(self):
        bucket = TokenBucket(10, 10, 0)
        bucket.charge(30, 0)
        assert bucket.wait(0) == 2
        assert bucket.wait(S) == 1
        assert bucket.wait(2 * S) == 0

    def test_time_that_goes_backwards_gives_nothing(self):
        bucket = TokenBucket(1, 1, 5 * S)
        assert bucket.take(1, 5 * S) == 0
        assert bucket.take(1, 0) > 0

    @given(
        st.lists(st.tuples(st.integers(0, 3 * S), st.integers(1, 5)), max_size=40),
        st.integers(1, 20),
        st.integers(1, 20),
    )
    def test_no_window_gives_more_than_burst_and_rate(self, steps, rate, burst):
        bucket, now, taken = TokenBucket(rate, burst, 0), 0, 0
        for passed, count in steps:
            now += passed
            if bucket.take(count, now) == 0:
                taken += count
                assert taken <= burst + rate * now / S + max(0, count - burst) + 1e-6


class TestCallers:
    def caller(self, models=("*",), roles=(Role.INFER,), **limits):
        return Caller(Grant("team", frozenset(roles), models, Limits(**limits)), 0)

    def test_requests_a_second_are_counted_with_the_time_to_wait(self):
        caller = self.caller(requests_per_second=2)
        caller.begin("m", 0)
        caller.begin("m", 0)
        error = refusal(caller)
        assert (error.detail, error.retry_after_s) == (ErrorDetail.RATE_LIMITED, 0.5)
        caller.begin("m", S)

    def test_requests_under_way_are_counted_until_they_end(self):
        caller = self.caller(concurrent=1)
        caller.begin("m", 0)
        assert "1 requests under way" in refusal(caller).message
        caller.end()
        caller.begin("m", 0)

    def test_a_refused_request_uses_nothing(self):
        caller = self.caller(concurrent=1, requests_per_second=1)
        caller.begin("m", 0)
        refusal(caller)
        caller.end()
        caller.begin("m", S)
        assert caller.under_way == 1

    def test_tokens_beyond_the_minutes_make_later_requests_wait(self):
        caller = self.caller(tokens_per_minute=60)
        assert caller.counts_tokens
        caller.begin("m", 0)
        caller.charge(90, 0)
        assert refusal(caller).retry_after_s == 30
        caller.begin("m", 31 * S)

    @pytest.mark.parametrize(
        ("models", "granted"), [(("digits", "smol*"), True), (("*",), True), (("other",), False), ((), False)]
    )
    def test_models_are_granted_by_name(self, models, granted):
        caller = self.caller(models)
        assert caller.may_ask("smollm2") is granted
        if not granted:
            assert refusal(caller, "smollm2").detail is ErrorDetail.FORBIDDEN

    def test_an_admin_has_every_role(self):
        assert self.caller(roles=(Role.ADMIN,)).has(frozenset({Role.OBSERVE}))
        assert not self.caller(roles=(Role.INFER,)).has(frozenset({Role.OBSERVE, Role.ADMIN}))

    def test_a_change_keeps_what_was_used(self):
        caller = self.caller(requests_per_second=1, burst=5)
        for _ in range(5):
            caller.begin("m", 0)
        caller.change(Grant("team", frozenset({Role.INFER}), ("*",), Limits(requests_per_second=1, burst=9)), 0)
        refusal(caller)
        assert caller.under_way == 5


class TestFiles:
    def test_a_key_leads_to_its_caller_and_another_to_nobody(self, tmp_path):
        found = table(tmp_path, team())
        assert found.caller_of(KEY).name == "team"
        assert found.caller_of(KEY + "x") is None
        assert found.caller_of("") is None
        assert found.caller_of("\ud800") is None
        assert found.anonymous.grant.roles == frozenset()

    def test_expired_keys_lead_to_nobody(self, tmp_path):
        text = f"callers:\n- name: team\n  keys:\n  - sha256: {key_hash(KEY)}\n    expires: 2027-01-01T00:00:00Z\n"
        before, after = datetime(2026, 12, 31, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
        assert table(tmp_path, text, today=lambda: before).caller_of(KEY).name == "team"
        assert table(tmp_path, text, today=lambda: after).caller_of(KEY) is None

    def test_a_changed_file_is_taken_and_keeps_callers_alive(self, tmp_path):
        found = table(tmp_path, team())
        caller = found.caller_of(KEY)
        caller.begin("m", 0)
        assert found.refresh() is False
        (tmp_path / "new").write_text(team("another-key-of-length", "anonymous: {roles: [observe]}\n"))
        (tmp_path / "new").replace(tmp_path / "access.yaml")
        assert found.refresh() is True
        assert found.caller_of(KEY) is None
        assert found.caller_of("another-key-of-length") is caller
        assert caller.under_way == 1
        assert found.anonymous.has(frozenset({Role.OBSERVE}))

    def test_a_caller_that_is_gone_may_begin_nothing_more(self, tmp_path):
        found = table(tmp_path, team())
        caller = found.caller_of(KEY)
        (tmp_path / "access.yaml").write_text("callers: []\n# nobody")
        assert found.refresh() is True
        assert refusal(caller).detail is ErrorDetail.FORBIDDEN

    def test_a_wrong_file_leaves_all_as_it_was_and_is_told_once(self, tmp_path, caplog):
        found = table(tmp_path, team())
        (tmp_path / "access.yaml").write_text("callers: 7")
        assert found.refresh() is False
        assert found.refresh() is False
        assert caplog.text.count("stays as it was") == 1
        assert found.caller_of(KEY).name == "team"
        (tmp_path / "access.yaml").unlink()
        assert found.refresh() is False
        assert found.caller_of(KEY).name == "team"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "expected a mapping"),
            ("a: [", "no YAML"),
            ("user: []", "user: no such entry"),
            ("callers: {}", "callers: expected a list"),
            ("callers: [7]", r"callers\[0\]: expected a mapping"),
            ("callers: [{name: 'a b'}]", r"callers\[0\].name: expected"),
            ("callers: [{name: anonymous}]", r"callers\[0\].name"),
            ("callers: [{name: a}, {name: a}]", "'a' is there twice"),
            ("callers: [{name: a, roles: [root]}]", "expected some of infer, observe, admin, got 'root'"),
            ("callers: [{name: a, role: [infer]}]", "role: no such entry"),
            ("callers: [{name: a, keys: [secret]}]", r"keys\[0\]: expected the SHA-256"),
            ("callers: [{name: a, keys: secret}]", "keys: expected a list"),
            ("callers: [{name: a, limits: {concurrent: 0}}]", "limits.concurrent: expected an integer above 0, got 0"),
            ("callers: [{name: a, limits: {concurrent: true}}]", "limits.concurrent"),
            ("callers: [{name: a, limits: {burst: 3}}]", "no effect without requests_per_second"),
            ("callers: [{name: a, limits: {rps: 3}}]", "limits.rps: no such entry"),
            ("anonymous: {keys: []}", "anonymous.keys: no such entry"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named_with_its_place(self, tmp_path, text, problem):
        with pytest.raises(AccessError, match=problem):
            table(tmp_path, text)

    def test_everything_wrong_is_told_at_once_and_no_secret_with_it(self, tmp_path):
        with pytest.raises(AccessError) as caught:
            table(tmp_path, "callers: [{name: a, roles: [x]}, {name: b, keys: [my-plain-key]}]")
        assert "callers[0].roles" in str(caught.value)
        assert "callers[1].keys[0]" in str(caught.value)
        assert "my-plain-key" not in str(caught.value)

    def test_the_same_key_cannot_be_two_callers(self, tmp_path):
        with pytest.raises(AccessError, match="the same key is there twice"):
            table(tmp_path, team() + f"- name: other\n  keys: [{key_hash(KEY)}]\n")

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["callers", "anonymous", "name", "roles", "models", "limits", "keys", "sha256", "expires", "concurrent"]) | st.text(max_size=3), inner, max_size=4), max_leaves=12))  # fmt: skip
    def test_any_document_is_taken_or_refused_in_words(self, tmp_path_factory, document):
        import yaml

        file = tmp_path_factory.mktemp("access") / "access.yaml"
        file.write_text(yaml.safe_dump(document))
        try:
            AccessTable(str(file), lambda: 0)
        except AccessError as error:
            assert str(file) in str(error)
