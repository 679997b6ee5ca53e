"""What jobs say of networks that do not let them through: names of several hosts, firewalls, packets that are lost
for their size.

python3 network_words_test.py SOURCE_DIR BUILD_DIR        (as root: the hosts' namespaces need it)
"""
import pathlib
import re
import sys
import time

from support.hosts import Hosts
from support.program import LIMIT_S, run_cases

BIN = pathlib.Path(sys.argv[2]).resolve() / "bin"
MIB = 1 << 20


def launch(hosts, host, *command, conf="join_timeout=1"):
    return hosts.launch(host, BIN / "lockstep", "run", "--nnodes", 2, "--rdzv-endpoint", "host1:29400", "--rdzv-conf",
                        conf, *command)


def names(hosts, *lines):
    """What the hosts' /etc/hosts has: one file, which all of them see."""
    with open(hosts.folder + "/hosts", "w", encoding="ascii") as file:
        file.write("127.0.0.1 localhost\n" + "".join(line + "\n" for line in lines))


def filter_input(hosts, host, rule):
    hosts.on(host, "nft", "add table inet wall; add chain inet wall i { type filter hook input priority 0; }; "
                          f"add rule inet wall i iifname eth0 {rule}")


def test_a_name_with_an_address_that_each_host_has(folder):
    with Hosts(folder, 2) as hosts:
        for host in (1, 2):
            hosts.on(host, "ip", "link", "add", "docker0", "type", "bridge")
            hosts.on(host, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        names(hosts, "10.77.0.1 host1", "172.17.0.1 host1")
        first, second = (launch(hosts, host, "true") for host in (1, 2))
        first.expect(1, r"several addresses \(10\.77\.0\.1, 172\.17\.0\.1\): the coordinator listens at 10\.77\.0\.1")
        second.expect(1, r"'host1' has the address 172\.17\.0\.1 of this host, and 10\.77\.0\.1, which this host has "
                         r"not: this launcher takes itself for the coordinator")
        # As it advises.
        first, second = launch(hosts, 1, "true", conf=""), launch(hosts, 2, "true", conf="is_host=0")
        for launcher in (first, second):
            launcher.expect(0)


def test_a_name_that_means_loopback_and_may_mean_two_addresses(folder):
    with Hosts(folder, 1) as hosts:
        hosts.on(1, "ip", "link", "add", "docker0", "type", "bridge")
        hosts.on(1, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        names(hosts, "127.0.1.1 host1")
        launch(hosts, 1, "true").expect(2, r"which of its 2 addresses is meant \(--local-addr\): "
                                           r"10\.77\.0\.1, 172\.17\.0\.1")


def test_a_signal_ends_a_launcher_that_waits_for_a_name_server(folder):
    deaf = pathlib.Path(folder) / "resolv.conf"
    deaf.write_text("nameserver 10.77.0.99\noptions timeout:30 attempts:2\n")
    asked = ("--rdzv-endpoint", "leader.test:29400"), ("--rdzv-endpoint", "10.77.0.1:29400", "--local-addr", "own.test")
    for options, first, status in zip(asked, ("TERM", "INT"), (143, 130)):
        with Hosts(f"{folder}/{first}", 1) as hosts:
            hosts.on(1, "mount", "--bind", deaf, "/etc/resolv.conf")
            # The question leaves, and nothing says that no host is there.
            hosts.on(1, "ip", "neigh", "add", "10.77.0.99", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
            launcher = hosts.launch(1, BIN / "lockstep", "run", "--nnodes", 2, *options, "true")
            hosts.on(1, "sh", "-c", "until grep -q ':0035 ' /proc/net/udp; do sleep 0.01; done")  # it has asked
            start = time.monotonic()
            hosts.on(1, "pkill", f"-{first}", "-x", "lockstep")
            launcher.expect(status)
            assert launcher.ended_at - start < 20, f"over {launcher.ended_at - start:.1f} s after SIG{first}"


def test_the_coordinator_is_found_again_while_no_name_server_answers(folder):
    deaf = pathlib.Path(folder) / "resolv.conf"
    deaf.write_text("nameserver 10.77.0.99\noptions timeout:6 attempts:1\n")
    script = "echo here $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000"
    with Hosts(folder, 2) as hosts:
        hosts.on(2, "mount", "--bind", deaf, "/etc/resolv.conf")
        hosts.on(2, "ip", "neigh", "add", "10.77.0.99", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
        first, second = (launch(hosts, host, "--max-restarts", 1, "--verbose", "sh", "-c", script,
                                conf="heartbeat_timeout=4,join_timeout=300,rejoin_timeout=300") for host in (1, 2))
        for launcher in (first, second):
            launcher.await_text("here 0")
        names(hosts)
        hosts.do("drop", 2, 1)
        hosts.on(2, "sh", "-c", "until grep -q ':0035 ' /proc/net/udp; do sleep 0.01; done")  # it has asked
        hosts.do("undrop")
        asked = len(re.findall("connecting to the launcher", second.text))
        for launcher in (first, second):
            launcher.expect(0, "here 1")
        # The first attempt since then: each took longer than an answer may.
        assert len(re.findall("connecting to the launcher", second.text)) <= asked + 1, second


def test_a_firewall_before_the_coordinator(folder):
    for how, what in (("drop", "no answer"), ("reject with tcp reset", "Connection refused")):
        with Hosts(folder, 2) as hosts:
            filter_input(hosts, 1, f"meta l4proto tcp {how}")
            first, second = (launch(hosts, host, "true") for host in (1, 2))
            first.expect(1, r"1 of 2 hosts came within 1 s .*; do they reach 10\.77\.0\.1:29400 \(a firewall, ")
            second.expect(1, rf"could not reach a coordinator at host1:29400 within 1 s; tried 10\.77\.0\.1: {what} "
                             r"\(is a launcher started there, and does every firewall")


def test_a_host_that_is_not_heard_ends_when_the_others_have(folder):
    go = pathlib.Path(folder) / "go"
    script = f"echo here; test $RANK = 0 || exec sleep 1000; until test -e {go}; do sleep 0.05; done; exit 42"
    with Hosts(folder, 2) as hosts:
        first, second = (launch(hosts, host, "sh", "-c", script, conf="heartbeat_timeout=2,join_timeout=300,"
                                "rejoin_timeout=300,keep_alive_interval=0.2") for host in (1, 2))
        second.await_text("here")
        hosts.do("drop", 2, 1)
        go.touch()
        first.expect(42)
        second.expect(1, "(rank 0 on host1 exited with status 42|lost the connection to the coordinator)")


def test_a_firewall_before_the_store_is_no_long_silence(folder):
    with Hosts(folder, 2) as hosts:
        for host in (1, 2):
            hosts.on(host, "ip", "addr", "add", f"fd00:77::{host}/64", "dev", "eth0", "nodad")
        names(hosts, "10.77.0.1 leader", "fd00:77::1 leader")
        filter_input(hosts, 1, "tcp dport 29700 reject with tcp reset")
        # Long after its line.
        ranks = hosts.start_ranks([BIN / "collectives"], 1, MASTER_ADDR="leader", LOCKSTEP_TIMEOUT="40")
        line = ranks[1].stderr.readline()
        closed = "no connection (Connection refused)"
        assert f"leader:29700 cannot be reached yet: 10.77.0.1: {closed}; fd00:77::1: {closed}; trying" in line, line
        hosts.on(1, "nft", "delete", "table", "inet", "wall")
        for rank in ranks:
            out, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0, out + errors


def test_packets_that_are_lost_for_their_size(folder):
    with Hosts(folder, 2) as hosts:
        for host in (1, 2):
            filter_input(hosts, host, "meta length > 1000 drop")
        # Far more time than three attempts of the kernel's take.
        ranks = hosts.start_ranks([BIN / "bench_wire", MIB, 1], 2, LOCKSTEP_TIMEOUT="10")
        for rank in ranks:
            out, errors = rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 1, out + errors
            # Its own, or another rank's where it waits only.
            assert re.search(r"timed out after 10 s .*what rank \d has sent to rank \d at 10\.77\.0\.[12] \d+ does not "
                             r"arrive, however often it is sent again", errors), errors


if __name__ == "__main__":
    run_cases([case for name, case in list(globals().items()) if name.startswith("test_")])
