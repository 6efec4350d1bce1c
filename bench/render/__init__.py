"""bench render: manifests to run on clusters that are somebody else's."""
