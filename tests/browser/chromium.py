"""A headless Chromium, driven by the debugging protocol over two pipes: JSON messages, each ended by a zero byte."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0  # seconds for any answer


class Chromium:
    """One tab; `errors` are the complaints of console, policy and scripts, `requests` the requested addresses."""

    def __init__(self, profile):
        self.errors, self.requests, self._ids, self._rest, self._loaded = [], [], itertools.count(1), b"", set()
        (there, self._write), (self._read, back) = os.pipe(), os.pipe()
        # The browser reads its file 3 and writes its file 4.
        command = (f'exec "$0" "$@" 3<&{there} 4>&{back}', PROGRAM, "--headless", "--no-sandbox", "--disable-gpu",
                   "--remote-debugging-pipe", "--hide-scrollbars", "--no-first-run", f"--user-data-dir={profile}")
        self._process = subprocess.Popen(["bash", "-c", *command], pass_fds=(there, back), stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
        os.close(there)
        os.close(back)
        os.set_blocking(self._read, False)
        self._session = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def close(self):
        self._session = None
        self.ask("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def ask(self, method, **parameters):
        """Return the answer to one command."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _until(self, wanted):
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._message(deadline)
            self._note(message)
            if wanted(message):
                return message

    def _message(self, deadline):
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise RuntimeError(f"the browser ended with exit code {self._process.wait()}")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message):
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"].get("exception", given["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Page.lifecycleEvent" and given["name"] == "load":
            self._loaded.add(given["loaderId"])

    def show(self, path, width=1280, height=900, *, dark=False, scripts=True):
        self.errors.clear()
        self.requests.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                 mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        loader = self.ask("Page.navigate", url=f"file://{path}")["loaderId"]
        while loader not in self._loaded:  # the event of an earlier page may come late
            self._until(lambda message: message.get("method") == "Page.lifecycleEvent")

    def run(self, expression):
        """Return the value of a JavaScript expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, selector):
        """Wait until an element matches the selector."""
        self.ask("Runtime.evaluate", awaitPromise=True, expression=f"""new Promise((done) => {{ const look = () =>
            document.querySelector("{selector}") ? done(true) : requestAnimationFrame(look); look(); }})""")

    def press(self, key):
        code = {" ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}[key]
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                     text=" " if (kind, key) == ("keyDown", " ") else "")

    def picture(self, path):
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
