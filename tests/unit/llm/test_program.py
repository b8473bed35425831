"""Programs run their kernels in order, over whatever rows they are given, with any number of threads."""

import numpy as np
import pytest
import torch
from numba import carray

from headrace_backends.llm.kernels.emitting import at, compiled, take
from headrace_backends.llm.program import Program, Variable

WIDTH = 96


@pytest.fixture(scope="module")
def add():
    """Out [rows, width] = one + other + number, a row a task."""

    def kernel(args):
        of = carray(args, (7,))
        while True:
            row = take(of.ctypes.data)
            if row >= of[1]:
                break
            one = at(of[3] + row * of[2] * 4, (of[2],), np.float32)
            other = at(of[4] + row * of[2] * 4, (of[2],), np.float32)
            out = at(of[5] + row * of[2] * 4, (of[2],), np.float32)
            for d in range(of[2]):
                out[d] = one[d] + other[d] + of[6]

    return compiled(kernel)


def _filled(program, name, count, value):
    rows = program.rows(name, WIDTH, torch.float32)
    program.make_room(count)
    rows.tensor[:count] = value
    return rows


def test_a_later_kernel_sees_all_that_an_earlier_one_wrote_however_many_threads_there_are(add):
    """Each doubles what the last one left: a row that is read too soon gives another number."""
    program = Program()
    one, other = (program.rows(name, WIDTH, torch.float32) for name in ("one", "other"))
    for at_step in range(20):
        given, out = (one, other) if at_step % 2 == 0 else (other, one)
        program.run(add, program.count, WIDTH, given, given, out, 1, wide=True)
    for threads in (1, 2, 5):
        for _ in range(200):
            _filled(program, "one", 7, 0.0)
            program.execute(7, threads, 1)
            assert torch.equal(one.tensor[:7], torch.full((7, WIDTH), 2.0**20 - 1))


def test_variables_are_put_where_they_are_used_with_what_is_added_to_them(add):
    program = Program()
    out, number, source = program.rows("out", WIDTH, torch.float32), Variable(), Variable()
    program.run(add, program.count, WIDTH, source, source.plus(4 * WIDTH), out, number.plus(3))
    given = torch.arange(3.0)[:, None].repeat(1, WIDTH).contiguous()
    program.put(source, given.data_ptr())
    for value in (0, 10):
        program.put(number, value)
        program.execute(2, 1, 1)
        assert out.tensor[:2, 0].tolist() == [1 + value + 3, 3 + value + 3]


def test_room_grows_with_the_rows_and_names_mean_the_same_rows(add):
    program = Program()
    out = program.rows("out", WIDTH, torch.float32)
    assert program.rows("out", WIDTH, torch.float32) is out
    assert program.rows("out", WIDTH + 8, torch.float32) is not out
    ones = torch.ones(1000, WIDTH)
    program.run(add, program.count, WIDTH, ones.data_ptr(), ones.data_ptr(), out, 0)
    for count in (1, 64, 65, 1000, 3):
        program.make_room(count)
        out.tensor[:] = 0
        program.execute(count, 2, 1)
        assert out.tensor[:count].eq(2).all()
        assert not out.tensor[count:].any()


def test_calls_run_between_kernels_and_bring_tensors_of_their_own(add):
    program = Program()
    given, out = _filled(program, "given", 4, 1.0), program.rows("out", WIDTH, torch.float32)
    between, brought = program.rows("between", WIDTH, torch.float32), program.foreign("brought", WIDTH, torch.float32)
    program.run(add, program.count, WIDTH, given, given, between, 0)
    program.call(lambda running, count: running.replace(brought, between.tensor[:count] * 10))
    program.run(add, program.count, WIDTH, brought, given, out, 0)
    for count in (4, 2):
        program.make_room(4)
        given.tensor[:4] = 1.0
        program.execute(count, 2, 1)
        assert out.tensor[:count].eq(21).all()


def test_a_tensor_that_kernels_could_not_read_is_refused():
    program = Program()
    brought = program.foreign("brought", WIDTH, torch.float32)
    with pytest.raises(AssertionError):
        program.replace(brought, torch.ones(WIDTH, 4).T)
    with pytest.raises(AssertionError):
        program.replace(brought, torch.ones(4, WIDTH, dtype=torch.bfloat16))
