"""Hosts that have IPv6 addresses only, and one whose loopback interface is down.

python3 ipv6_test.py SOURCE_DIR BUILD_DIR        (as root: the host's namespaces need it)
"""
import pathlib
import sys

from support.program import run, run_cases

LOCKSTEP = pathlib.Path(sys.argv[2]).resolve() / "bin/lockstep"


def on_host(folder, names, *words, **variables):
    """`lockstep WORDS` on a host called nodea that has fd00::1 and loopback, with these lines in /etc/hosts."""
    path = pathlib.Path(folder) / "hosts"
    path.write_text(names, encoding="ascii")
    prepare = ("hostname nodea && ip link set lo up && "
               "ip link add d0 type veth peer name d1 && ip link set d1 up && ip link set d0 up && "
               f'ip addr add fd00::1/64 dev d0 nodad && mount --bind {path} /etc/hosts && exec "$@"')
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


if __name__ == "__main__":
    run_cases([test_the_doctor_knows_its_name_and_interfaces,
               test_a_loopback_interface_that_is_down_is_named,
               test_a_coordinator_whose_name_means_loopback_takes_its_only_address])
