"""The version, written once: the package metadata and ``transload --version`` both read it here."""

__version__ = "0.1.0"
