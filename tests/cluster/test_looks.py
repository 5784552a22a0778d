"""How often and how far policies look behind the first job that does not fit."""

from cumulo.cluster.decide.policy.looks import Looks, is_over


def test_looks_that_are_much_work_are_taken_more_seldom_and_reach_further():
    looks = Looks()
    assert not looks.too_soon(0.0) and looks.begin(0.0) == 200
    looks.end(tried=200, work=900, costly=True)  # few events: every 5 s
    assert looks.too_soon(4.9) and not looks.too_soon(5.0)
    looks.passed_over = 100
    many = looks.begin(5.0)
    assert many == 12 * 200 and looks.passed_over == 0
    looks.end(many, work=900, costly=True)
    assert looks.too_soon(19.9) and not looks.too_soon(20.0)
    looks.passed_over = 100
    assert looks.begin(20.0) == 3 * 12 * 200
    looks.end(many, work=10, costly=True)
    assert not looks.too_soon(25.0)
    looks.end(200, work=10, costly=False)
    assert not looks.too_soon(20.1)  # at every event


def test_looks_that_are_always_costly_are_taken_every_few_seconds():
    looks = Looks(always_costly=True)
    looks.begin(0.0)
    looks.end(200, work=1, costly=False)
    assert looks.too_soon(4.9) and not looks.too_soon(5.0)


def test_a_look_ends_with_much_work_but_not_before_it_reached_as_far_as_it_always_does():
    assert is_over(tried=2400, work=1500)
    assert not is_over(tried=2400, work=100) and not is_over(tried=200, work=5000)
