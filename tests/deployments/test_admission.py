import pytest

from configs.schema import AdmissionConfig
from deployments.admission import AdmissionController
from replicas.errors import InvalidRequestError, QueueFullError


def test_requests_are_counted_per_model_and_given_back():
    admission = AdmissionController(AdmissionConfig(max_live_requests=3))
    with admission.admit("a", 2, 10):
        assert (admission.live_requests("a"), admission.live_tokens("a")) == (2, 10)
        with admission.admit("b", 3, 5), admission.admit("a", 1, 1):
            assert admission.live_requests("a") == 3
        assert admission.live_requests("b") == 0
    assert (admission.live_requests("a"), admission.live_tokens("a")) == (0, 0)


def test_full_queue_names_the_wait():
    admission = AdmissionController(AdmissionConfig(max_live_requests=2, retry_after_s=7))
    with admission.admit("a", 1, 1):
        with pytest.raises(QueueFullError) as caught, admission.admit("a", 2, 1):
            pytest.fail("admitted")
        assert caught.value.retry_after_s == 7
        assert admission.live_requests("a") == 1  # all or none
        with admission.admit("a", 1, 1):
            assert admission.live_requests("a") == 2


def test_token_limit():
    admission = AdmissionController(AdmissionConfig(max_live_tokens=100))
    with admission.admit("a", 1, 60):
        with pytest.raises(QueueFullError), admission.admit("a", 1, 41):
            pytest.fail("admitted")
        with admission.admit("a", 1, 40):
            assert admission.live_tokens("a") == 100


def test_what_can_never_fit_is_the_clients_mistake():
    admission = AdmissionController(AdmissionConfig(max_live_requests=2, max_live_tokens=100))
    with pytest.raises(InvalidRequestError, match=r"2 .* got 3") as caught, admission.admit("a", 3, 1):
        pytest.fail("admitted")
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequestError, match=r"100 .* got 101"), admission.admit("a", 1, 101):
        pytest.fail("admitted")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_released_once_on_every_way_out(error):
    admission = AdmissionController(AdmissionConfig())
    with pytest.raises(error), admission.admit("a", 2, 9):
        raise error
    assert (admission.live_requests("a"), admission.live_tokens("a")) == (0, 0)
