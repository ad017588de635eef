"""Two forms of every story, so that what is true of one is shown of both."""

import pytest


@pytest.fixture(params=["nsys", "pytorch"])
def form(request):
    return request.param
