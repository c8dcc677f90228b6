"""The pluggy markers, under the one project name ``fuel``."""

import pluggy

PROJECT = "fuel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
