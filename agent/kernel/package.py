"""What is known of this package where it runs."""

NAME = "intercept-agent"


def version() -> str:
    """Return the version that is installed, or `unknown` in a checkout that is not."""
    from importlib import metadata  # slow to import, and most commands never ask

    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "unknown"
