"""Settings for all tests: hypothesis without deadlines; in CI without shrinking and from a fixed seed. Signals as in a
terminal."""

import os
import signal

from hypothesis import HealthCheck, Phase, settings

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    derandomize=True,
    print_blob=True,
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Who starts the tests in the background, or with nohup, has these ignored: so would all programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
