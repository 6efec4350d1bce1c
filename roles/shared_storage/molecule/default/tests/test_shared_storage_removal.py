def test_removal_leaves_only_the_data(nodes):
    """Runs last, because it removes the share."""
    assert nodes.as_user("w1", "echo kept > /shared/results/kept").rc == 0
    done = nodes.apply("remove")
    assert done.returncode == 0, done.stdout
    for name in nodes.names:
        assert nodes.run(name, "mountpoint -q /shared").rc != 0
        assert nodes[name].check_output("dpkg-query -W -f '${Package} ${Status}\\n' | grep gluster | cat") == ""
        assert nodes[name].check_output("pgrep -l gluster | cat") == ""
        left = "find /etc /var/lib /usr/local -path '*gluster*' -o -name '*shared-storage*'"
        assert nodes[name].check_output(left) == ""
    assert nodes["head"].file("/srv/share/glusterfs/results/kept").content_string == "kept\n"
