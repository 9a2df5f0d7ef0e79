"""A client of the Debug Adapter Protocol, as much as tests need: what VS Code says to debugpy, over a socket."""

import json
import socket
import time
from typing import Any


class DapError(AssertionError):
    """debugpy refused a request, or did not answer in time; the message has all that was heard."""


class DapClient:
    """One session; requests are answered in order of their numbers, events are kept until somebody asks for them."""

    def __init__(self, port: int, *, within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=within_s)
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        self._file = self._socket.makefile("rb")
        self._sent = 0
        self._responses: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self.request(
            "initialize",
            adapterID="debugpy",
            clientID="tests",
            pathFormat="path",
            linesStartAt1=True,
            columnsStartAt1=True,
            supportsVariableType=True,
            supportsStartDebuggingRequest=False,
        )

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; returns its number."""
        self._sent += 1
        body = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(body).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return self._sent

    def answer(self, number: int, *, within_s: float = 60.0) -> dict[str, Any]:
        """The body of the response to a request that was sent."""
        end = time.monotonic() + within_s
        while number not in self._responses:
            self._hear(end)
        response = self._responses.pop(number)
        if not response["success"]:
            raise DapError(f"{response['command']}: {response.get('message')}")
        return response.get("body") or {}

    def request(self, command: str, *, within_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its response's body."""
        return self.answer(self.send(command, **arguments), within_s=within_s)

    def event(self, *names: str, within_s: float = 60.0) -> dict[str, Any]:
        """The first event of one of these names that nobody has taken; it has its name as "event"."""
        end = time.monotonic() + within_s
        while True:
            for k, event in enumerate(self._events):
                if event["event"] in names:
                    del self._events[k]
                    return {**(event.get("body") or {}), "event": event["event"]}
            self._hear(end)

    def configure(self, breakpoints: dict[str, list[int]]) -> None:
        """What follows the event "initialized": breakpoints by file, then the run goes on."""
        self.event("initialized")
        for path, lines in breakpoints.items():
            self.request("setBreakpoints", source={"path": path}, breakpoints=[{"line": line} for line in lines])
        self.request("setExceptionBreakpoints", filters=[])
        self.request("configurationDone")

    # ---- a thread that stopped ----

    def frames(self, thread: int) -> list[dict[str, Any]]:
        """Its frames, innermost first."""
        return self.request("stackTrace", threadId=thread)["stackFrames"]

    def variables(self, reference: int) -> dict[str, dict[str, Any]]:
        """What the variables pane shows below something that can be opened, by name."""
        return {row["name"]: row for row in self.request("variables", variablesReference=reference)["variables"]}

    def local_variables(self, frame: int) -> dict[str, dict[str, Any]]:
        """What the variables pane shows of a frame."""
        scopes = self.request("scopes", frameId=frame)["scopes"]
        return self.variables(next(scope["variablesReference"] for scope in scopes if scope["name"] == "Locals"))

    def value(self, expression: str, frame: int) -> str:
        """What the watch pane shows of an expression."""
        return self.request("evaluate", expression=expression, frameId=frame, context="watch")["result"]

    def thread_names(self) -> dict[int, str]:
        """The threads of the process, as the call stack pane names them."""
        return {row["id"]: row["name"] for row in self.request("threads")["threads"]}

    def close(self) -> None:
        """End the session; the process goes on."""
        self._file.close()
        self._socket.close()

    def _hear(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise DapError(f"nothing was heard in time; kept are {self._events} {self._responses}")
        self._socket.settimeout(left)
        length = 0
        while True:
            line = self._file.readline()
            if not line:
                raise DapError(f"debugpy hung up; kept are {self._events}")
            if line == b"\r\n":
                break
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        message = json.loads(self._file.read(length))
        if message["type"] == "response":
            self._responses[message["request_seq"]] = message
        elif message["type"] == "event":
            self._events.append(message)
