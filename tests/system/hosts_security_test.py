"""What strangers and other jobs can do to a job on several pretend hosts: nothing.

python3 hosts_security_test.py SOURCE_DIR BUILD_DIR [CASE...]        (as root: the hosts' namespaces need it)
"""
import pathlib
import re
import sys

from support.hosts import Hosts, TOKEN
from support.program import run_cases

LOCKSTEP = pathlib.Path(sys.argv[2]).resolve() / "bin/lockstep"
CONF = "heartbeat_timeout=2,keep_alive_interval=0.2,join_timeout=100"


def launch(hosts, host, script, *flags, conf=CONF, **more):
    return hosts.launch(host, LOCKSTEP, "run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", "host1:29400",
                        "--rdzv-conf", conf, *flags, "sh", "-c", script, **more)


def speak(hosts, host, code):
    """Runs Python there, with `connect()` to the rendezvous; returns what it prints."""
    prelude = ("import socket, time\n"
               "def connect(): return socket.create_connection(('host1', 29400), 30)\n")
    return hosts.on(host, "python3", "-c", prelude + code)


def await_listening(hosts):
    hosts.on(1, "sh", "-c", "until ss -Htln | grep -q :29400; do sleep 0.02; done")


def test_a_wrong_token_is_refused_and_the_job_goes_on(folder):
    with Hosts(folder, 2) as hosts:
        first = launch(hosts, 1, "echo ran")
        wrong = launch(hosts, 2, "echo ran", token="not the token of this job", conf="join_timeout=1")
        first.await_text(r"10\.77\.0\.2:\d+: .*does not know this job's token, or has another --rdzv-id")
        wrong.expect(1, "host1:29400 closed the connection during the handshake: check that both hosts have",
                     "could not reach a coordinator at host1:29400 within 1 s; last error: ")
        right = launch(hosts, 2, "echo ran")
        first.expect(0, "ran")
        right.expect(0, "ran")
        assert "ran" not in wrong.text


def test_strangers_cost_a_line_and_not_the_job(folder):
    with Hosts(folder, 2) as hosts:
        go = folder + "/go"
        both = [launch(hosts, host, f"echo up; until test -e {go}; do sleep 0.02; done; echo ran") for host in (1, 2)]
        for launcher in both:
            launcher.await_text("up")
        assert speak(hosts, 2, "c = connect(); c.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); print(c.recv(9))") == "b''\n"
        both[0].await_text(r"10\.77\.0\.2:\d+: .*a program that is not a launcher sent 'GET / HT'")
        # Many at once: some say nothing, some say rubbish; those beyond a limit are let go.
        # What was not read when a connection is closed resets it.
        speak(hosts, 2, "all = [connect() for _ in range(600)]\n"
                        "def until_it_ends(act):\n"
                        "  try: act()\n"
                        "  except (ConnectionResetError, BrokenPipeError): pass\n"
                        "for c in all[::2]: until_it_ends(lambda: c.sendall(bytes(range(256))))\n"
                        "for c in all[:200]: until_it_ends(lambda: c.recv(9))")
        both[0].await_text(r"\(and \d+ before it\)$")
        lines = len(re.findall("not a launcher|make room|did not prove", both[0].text))
        assert lines < 20, f"{lines} lines about strangers:\n{both[0]}"
        pathlib.Path(go).touch()
        for launcher in both:
            launcher.expect(0, "ran")


def test_a_coordinator_that_is_replaced_at_once_starts_nothing_beside_ranks_of_the_one_before(folder):
    """host2's ranks take their time to end; host3 is new to the job and would make it complete."""
    with Hosts(folder, 3) as hosts:
        conf = CONF + ",same_command=0"
        slow = "echo here; trap '' TERM; while :; do sleep 0.1; done"
        first, second = (launch(hosts, host, slow, "--grace", 3, conf=conf) for host in (1, 2))
        for launcher in (first, second):
            launcher.await_text("here")
        hosts.on(1, "pkill", "-KILL", "-x", "lockstep")
        again, third = (launch(hosts, host, "echo again", "--grace", 3, conf=conf) for host in (1, 3))
        again.expect(0, r"host2 .* has to wait: its ranks of an earlier start are being stopped", "again")
        third.expect(0, "again")
        second.expect(1)
        hosts.expect_nothing_left()


def test_a_coordinator_that_is_replaced_goes_on_counting_restarts(folder):
    """host2's ranks take their time to end, so that the new coordinator is there before it would be missed."""
    with Hosts(folder, 2) as hosts:
        script = ("test $TORCHELASTIC_RESTART_COUNT = 0 || { echo restart $TORCHELASTIC_RESTART_COUNT; exit 0; }; "
                  "trap '' TERM; echo here; while :; do sleep 0.1; done")
        flags = ("--grace", 3, "--max-restarts", 1)
        first, second = (launch(hosts, host, script, *flags) for host in (1, 2))
        for launcher in (first, second):
            launcher.await_text("here")
        hosts.on(1, "pkill", "-KILL", "-x", "lockstep")
        again = launch(hosts, 1, script, *flags)
        again.expect(0, "restart 1$")
        second.expect(0, "restart 1$")
        hosts.expect_nothing_left()


def test_two_jobs_at_one_endpoint(folder):
    with Hosts(folder, 2) as hosts:
        go = folder + "/go"
        script = f"echo here; until test -e {go}; do sleep 0.05; done"
        first = [launch(hosts, host, script) for host in (1, 2)]
        for launcher in first:
            launcher.await_text("here")
        # Another program, on both hosts: refused on both, with both commands.
        for launcher in [launch(hosts, host, "echo another") for host in (1, 2)]:
            launcher.expect(2, r"the coordinator at host1:29400 refuses this host: host\d was started with the command "
                            "'sh -c echo another', the job has the command 'sh -c echo here")
        first[0].await_text(r"refused host2 \(10\.77\.0\.2\): host2 was started with the command 'sh -c echo another'")
        # The same program: no different from a spare, and told that it is one.
        spare = launch(hosts, 2, script)
        spare.await_text("all 2 places of the job are taken: this launcher is a spare")
        first[0].await_text("host2 .* is a spare")
        pathlib.Path(go).touch()
        for launcher in [*first, spare]:
            launcher.expect(0)
        hosts.expect_nothing_left()


def test_another_version_is_named(folder):
    with Hosts(folder, 2) as hosts:
        first = launch(hosts, 1, "echo ran")
        await_listening(hosts)
        answer = speak(hosts, 2, "c = connect(); c.sendall(b'LOCKSTEP' + bytes([0, 9]) + bytes(32)); print(c.recv(10))")
        assert answer == "b'LOCKSTEP\\x00\\x03'\n", answer
        first.await_text("the other launcher speaks version 9 of the protocol, this one version 3: "
                         "install the same lockstep")


def test_tls_by_option(folder):
    with Hosts(folder, 2) as hosts:
        both = [launch(hosts, host, "echo ran", conf=CONF + ",tls=1") for host in (1, 2)]
        for launcher in both:
            launcher.expect(0, "ran")
        first = launch(hosts, 1, "echo ran", conf=CONF + ",tls=1")
        await_listening(hosts)
        plain = launch(hosts, 2, "echo ran", conf="join_timeout=1")
        plain.expect(1, "not reach a coordinator at host1:29400 within 1 s; last error: .*(handshake|not a launcher)")
        first.await_text("TLS: no handshake")
    with Hosts(folder, 2) as hosts:
        # One flag for launchers and ranks.
        both = [launch(hosts, host, "echo ran with LOCKSTEP_TLS=$LOCKSTEP_TLS", "--tls") for host in (1, 2)]
        for launcher in both:
            launcher.expect(0, "ran with LOCKSTEP_TLS=1")


def test_nothing_listens_beyond_the_hosts_own_address_and_the_token_is_nowhere(folder):
    with Hosts(folder, 2) as hosts:
        both = [launch(hosts, host, "echo up $$; exec sleep 1000") for host in (1, 2)]
        for host, launcher in enumerate(both, 1):
            launcher.await_text(r"up \d+")
            listening = hosts.on(host, "ss", "-Htln").split("\n")[:-1]
            # The coordinator, and rank 0's store.
            assert bool(listening) == (host == 1), listening
            for line in listening:
                assert f" 10.77.0.{host}:" in line, line
            assert TOKEN not in hosts.on(host, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            rank = re.search(r"up (\d+)", launcher.text)[1]
            environment = hosts.on(host, "sh", "-c", f"tr '\\0' '\\n' < /proc/{rank}/environ")
            assert "RANK=" in environment and TOKEN not in environment, environment
        # A caught SIGTERM: 143 everywhere.
        hosts.on(1, "pkill", "-TERM", "-x", "lockstep")
        for launcher in both:
            launcher.expect(143)


def test_a_token_file_that_others_may_read_is_refused(folder):
    token = pathlib.Path(folder) / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    with Hosts(folder, 1) as hosts:
        launch(hosts, 1, "true", token="", LOCKSTEP_TOKEN_FILE=str(token)).expect(2, "others may read it .*chmod 600")


if __name__ == "__main__":
    wanted = sys.argv[3:]
    run_cases([case for name, case in list(globals().items())
               if name.startswith("test_") and (not wanted or name in wanted)])
