"""Hosts that have IPv6 addresses only, and one whose loopback interface is down.

python3 ipv6_test.py SOURCE_DIR BUILD_DIR        (as root: the host's namespaces need it)
"""
import pathlib
import sys

from support.program import run, run_cases

LOCKSTEP = pathlib.Path(sys.argv[2]).resolve() / "bin/lockstep"


def on_host(folder, names, *words, addresses=("fd00::1", ), **variables):
    """`lockstep WORDS` on a host called nodea that has these addresses and loopback, with these lines in /etc/hosts."""
    path = pathlib.Path(folder) / "hosts"
    path.write_text(names, encoding="ascii")
    prepare = ("hostname nodea && ip link set lo up && "
               "ip link add d0 type veth peer name d1 && ip link set d1 up && ip link set d0 up && "
               f"{''.join(f'ip addr add {address}/64 dev d0 nodad && ' for address in addresses)}"
               f'mount --bind {path} /etc/hosts && exec "$@"')
    return run("unshare", "-n", "-m", "-u", "bash", "-c", prepare, "-", LOCKSTEP, *words, **variables)


def test_the_doctor_knows_its_name_and_interfaces(folder):
    done = on_host(folder, "::1 localhost\nfd00::1 nodea\n", "doctor")
    assert "nodea, has no address" not in done.out, done
    assert "name: nodea" in done.out, done
    assert "d0 fd00::1" in done.out, done


def test_a_coordinator_whose_name_means_loopback_takes_its_only_address(folder):
    done = on_host(folder, "::1 localhost\n127.0.1.1 nodea\n", "run", "--nnodes", "1:2",
                   "--rdzv-endpoint", "nodea:29400", "--rdzv-conf", "last_call_timeout=0",
                   "sh", "-c", "echo meets at $MASTER_ADDR",
                   LOCKSTEP_TOKEN="0123456789abcdef0123456789abcdef")
    done.expect(0, r"meets at fd00::1$")


def test_a_loopback_interface_that_is_down_is_named(folder):
    alone = ["unshare", "-n", LOCKSTEP]
    run(*alone, "doctor").expect(1, r"PROBLEM  the loopback interface, lo, is down")
    run(*alone, "run", "--nproc-per-node", "2", LOCKSTEP.parent / "collectives").expect(
        1, err=r"the loopback interface is down: ip link set lo up$")


# Two hosts, with interfaces of different names; LINK is the first one's link-local address, and
# in_a and in_b run a command there.
TWO_HOSTS = """
unshare -n -u --fork --kill-child sh -c 'hostname ha; exec sleep 1000' > /dev/null 2>&1 & A=$!
unshare -n -u --fork --kill-child sh -c 'hostname hb; exec sleep 1000' > /dev/null 2>&1 & B=$!
trap 'kill -9 $A $B' EXIT
in_a() { nsenter -t $(pgrep -P $A) -n -u "$@"; }
in_b() { nsenter -t $(pgrep -P $B) -n -u "$@"; }
until [ "$(in_a hostname 2> /dev/null)$(in_b hostname 2> /dev/null)" = hahb ]; do sleep 0.05; done
ip link add left netns $(pgrep -P $A) type veth peer name right netns $(pgrep -P $B)
in_a ip link set lo up; in_b ip link set lo up
in_a ip link set left up; in_b ip link set right up
until LINK=$(in_a ip -6 -o addr show dev left scope link | grep -o 'fe80[0-9a-f:]*') &&
      in_b ip -6 -o addr show dev right scope link | grep -q fe80; do sleep 0.05; done
"""


def test_link_local_addresses_have_each_hosts_own_interface(folder):
    # The addresses are still new, and may not be used for a second or two.
    lockstep = f"{LOCKSTEP} run --nnodes 2 --rdzv-endpoint [$LINK%{{}}]:29400 {LOCKSTEP.parent}/collectives"
    done = run("bash", "-c", f"{TWO_HOSTS} in_a {lockstep.format('left')} & "
               f"in_b {lockstep.format('right')} && wait $!",
               LOCKSTEP_TOKEN="0123456789abcdef0123456789abcdef", LOCKSTEP_TIMEOUT="30")
    done.expect(0, r"2 ranks on 2 hosts")


def test_a_coordinator_with_several_addresses_says_where_it_listens(folder):
    done = on_host(folder, "::1 localhost\nfd00::1 nodea\nfd00::2 nodea\n", "run", "--nnodes", "1:2",
                   "--rdzv-endpoint", "nodea:29400", "--rdzv-conf", "last_call_timeout=0", "true",
                   addresses=("fd00::1", "fd00::2"), LOCKSTEP_TOKEN="0123456789abcdef0123456789abcdef")
    done.expect(0, err=r"'nodea' has several addresses \(fd00::[12], fd00::[12]\): the coordinator listens at")


if __name__ == "__main__":
    run_cases([test_the_doctor_knows_its_name_and_interfaces,
               test_a_loopback_interface_that_is_down_is_named,
               test_link_local_addresses_have_each_hosts_own_interface,
               test_a_coordinator_with_several_addresses_says_where_it_listens,
               test_a_coordinator_whose_name_means_loopback_takes_its_only_address])
