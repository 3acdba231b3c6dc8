"""The resource manager: a daemon that keeps each sandbox's containers and makes its VM as big as they need."""

__version__ = "0.1.0"
