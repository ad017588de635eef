from megaboa.launch import environment


def test_a_rank_is_told_everything_torch_asks_for():
    assert environment.rank_environment(3, 1, 8, "node7", 29500) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "29500",
    }


def test_free_ports_differ_while_one_is_used():
    import socket

    with socket.socket() as used:
        used.bind(("127.0.0.1", environment.free_port()))
        assert environment.free_port() != used.getsockname()[1]
