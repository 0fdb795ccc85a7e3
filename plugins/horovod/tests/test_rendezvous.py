"""The server at which Horovod's gloo connects: where it listens, and what it answers."""

import http.client
import socket
import threading

import pytest

from torchhal_horovod._session import Session
from torchhal_horovod._slots import assign

pytestmark = pytest.mark.usefixtures("horovod")


@pytest.fixture
def started():
    """Starts a server for hosts with so many processes each, which is reached by ``host``."""
    from torchhal_horovod import _rendezvous as rendezvous

    stops = []

    def start(host, *nodes):
        server, stop = rendezvous.serve(assign(nodes), host)
        stops.append(stop)
        return server

    yield start
    for stop in stops:
        stop()


def own_address():
    """An address of this host that isn't the loopback interface's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has the loopback interface alone")
        return probe.getsockname()[0]


def test_listens_where_the_other_hosts_reach_it(started):
    address = own_address()
    assert started(address, 0, 1).server_address[0] == address


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_listens_everywhere_where_the_address_is_none_of_this_host(started, host):
    assert started(host, 0, 1).server_address[0] == "0.0.0.0"


def test_listens_everywhere_where_this_hosts_name_is_a_loopback_address(started):
    """The others may know the name by another address."""
    assert started("localhost", 0, 1).server_address[0] == "0.0.0.0"


def test_a_job_on_one_host_is_reached_on_the_loopback_interface(monkeypatch):
    """Whatever address its processes meet at."""

    class Environment:
        main_address = own_address()
        global_rank, world_size, node_rank = (staticmethod(lambda number=number: number) for number in (0, 2, 0))

    session, served = Session(), []
    monkeypatch.setattr("torchhal.distributed.collectives.all_gather_object", lambda value, name: [value, value])
    monkeypatch.setattr(session, "_serve", lambda slots, host: served.append(host) or 4000)
    variables = session._variables(Environment(), 10.0)
    assert served == [variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"]] == ["127.0.0.1"]


def test_a_session_of_one_host_listens_on_the_loopback_interface_alone(world2):
    """Seen from outside: what listens in rank 0 while it trains."""
    for addresses in world2.run(listeners_of_a_run):
        assert set(addresses) <= {"127.0.0.1"}
    assert world2.run(listeners_of_a_run)[0]


def listeners_of_a_run():
    """Return the addresses on which this process's rendezvous server listens while it trains."""
    import horovod_training as training

    found = []

    class Looks(training.Perceptron):
        def on_train_start(self):
            import gc

            from horovod.runner.http.http_server import RendezvousHTTPServer

            servers = [one for one in gc.get_objects() if isinstance(one, RendezvousHTTPServer)]
            found.extend(server.server_address[0] for server in servers if server.fileno() >= 0)

    training.fit("horovod", Looks(), max_epochs=1)
    return found


def answer(server, method, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_head_is_refused(started, tmp_path, monkeypatch):
    """Horovod's own handler inherits it from a server of files, and says what lies in the working directory."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    (tmp_path / "secret").write_text("12345")
    monkeypatch.chdir(tmp_path)
    assert answer(started("127.0.0.1", 0, 0), "HEAD", "/secret") == http.HTTPStatus.METHOD_NOT_ALLOWED
    with RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, False) as theirs:
        thread = threading.Thread(target=theirs.handle_request, daemon=True)
        thread.start()
        assert answer(theirs, "HEAD", "/secret") == http.HTTPStatus.OK
        thread.join()
