"""The options about the response cache: one cache, complete, and everything wrong with it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cache_options import LocalCacheSettings, RedisSettings
from headrace.config import load_config
from headrace.options import UsageError


@pytest.fixture
def load(tmp_path: Path):
    return lambda *argv, **environ: load_config([f"--model-repository={tmp_path}", *argv], environ)


def test_there_is_no_cache_unless_one_is_asked_for(load):
    assert load().cache is None
    assert load("--response-cache-byte-size=0").cache is None


def test_a_local_cache_has_a_size(load):
    assert load("--cache-config=local,size=1048576").cache == LocalCacheSettings(1048576)
    assert load("--cache-config", "local,size=5").warnings == ()


def test_the_old_option_makes_a_local_cache_and_says_what_to_write(load):
    config = load("--response-cache-byte-size=1024")
    assert config.cache == LocalCacheSettings(1024)
    assert config.warnings == ("--response-cache-byte-size is deprecated: use --cache-config local,size=1024",)


def test_the_settings_of_redis_come_in_one_option_or_in_several(load):
    expected = RedisSettings("db.local", 6380, password="a,b", db=2, pool_size=4, socket_timeout_ms=50)
    one = "--cache-config=redis,host=db.local,port=6380,password=a,b,db=2,pool_size=4,socket_timeout=50"
    several = [f"--cache-config=redis,{part}" for part in ("host=db.local", "port=6380", "password=a,b", "db=2")]
    assert load(one).cache == expected
    assert (
        load(*several, "--cache-config=redis,pool_size=4", "--cache-config=redis,socket_timeout=50").cache == expected
    )


def test_user_and_password_may_come_from_the_environment(load):
    environ = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "p"}
    settings = load("--cache-config=redis,host=h,port=1", **environ).cache
    assert (settings.user, settings.password) == ("u", "p")
    settings = load("--cache-config=redis,host=h,port=1,user=x", **environ).cache
    assert (settings.user, settings.password) == ("x", "p")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--cache-config=local"], "expected <cache>,<key>=<value>, got 'local'"),
        (["--cache-config=size=5"], "expected <cache>,<key>=<value>, got 'size=5'"),
        (["--cache-config=local,size=0"], "--cache-config local,size: expected an integer >= 1, got '0'"),
        (["--cache-config=local,sizes=5"], "--cache-config local: unknown setting 'sizes'; there are size"),
        (["--cache-config=redis,host=h"], "--cache-config redis: port is missing"),
        (["--cache-config=redis,host=,port=1"], "--cache-config redis: host is missing"),
        (["--cache-config=redis,host=h,port=x"], "--cache-config redis,port: expected an integer from 1 to 65535"),
        (["--cache-config=disk,path=x"], "--cache-config: unknown cache 'disk'; there are local, redis"),
        (
            ["--cache-config=local,size=5", "--cache-config=redis,host=h"],
            "--cache-config: a server has one response cache, got settings for local and redis",
        ),
        (
            ["--cache-config=local,size=5", "--response-cache-byte-size=5"],
            "--response-cache-byte-size: --cache-config says which cache there is already",
        ),
    ],
)
def test_what_is_wrong_is_told(load, argv, problem):
    with pytest.raises(UsageError) as raised:
        load(*argv)
    assert any(problem in found for found in raised.value.problems), raised.value.problems
