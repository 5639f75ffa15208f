"""The store connector: saves and loads over the Mooncake store."""
