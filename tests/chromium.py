"""A real browser for tests: headless Chromium, driven by chromedriver over HTTP (W3C WebDriver)."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from waiting import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "Chromium and chromedriver are not installed"
IS_THERE = bool(CHROMIUM and CHROMEDRIVER)

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]


class Chromium:
    """One window; use as a context manager, which ends the processes it started."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver, port = self._start()
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "binary": CHROMIUM,
            "args": [*_ARGUMENTS, f"--user-data-dir={self.profile.name}"],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": int(1000 * PATIENCE), "pageLoad": int(1000 * PATIENCE)},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self.session)
        finally:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.communicate()
            self.profile.cleanup()

    def _start(self) -> tuple[subprocess.Popen[str], int]:
        """Start chromedriver, which now and then ends at once; return the port it says."""
        for _ in range(5):
            driver = subprocess.Popen(
                [CHROMEDRIVER, "--port=0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # so that what it started can be ended with it
            )
            for line in driver.stdout:
                if found := re.search(r"started successfully on port (\d+)", line):
                    return driver, int(found[1])
            driver.communicate()
        raise RuntimeError("chromedriver does not start")

    def _call(self, method: str, path: str, body: object = None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                said = json.load(error)["value"]
            raise RuntimeError(f"{said['error']}: {said['message']}") from None

    def open(self, url: str) -> None:
        """Load an address and wait for it."""
        self._call("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *arguments):
        """Run the body of a function in the page and return what it returns."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self.session}/execute/sync", body)

    def command(self, name: str, **parameters):
        """Send a command of the Chrome DevTools Protocol."""
        body = {"cmd": name, "params": parameters}
        return self._call("POST", f"{self.session}/goog/cdp/execute", body)

    def show(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the screen and the colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Return what the console was told, errors and refused loads included."""
        entries = self._call("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]
