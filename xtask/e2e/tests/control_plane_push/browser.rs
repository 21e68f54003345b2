//! A real headless Chromium, driven by its `DevTools` protocol.
//!
//! Source: <https://chromedevtools.github.io/devtools-protocol/>, over a pair of pipes, with a zero byte after each
//! message.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use data_encoding::BASE64;
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long one answer may take.
const ANSWER: Duration = Duration::from_mins(1);

/// Runs `chromium`, which reads commands from 3 and writes answers to 4.
const START: &str = r#"exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
    --disable-background-networking --remote-debugging-pipe --window-size=1280,800 --user-data-dir="$0" \
    3<&0 4>&1 </dev/null >/dev/null 2>/dev/null"#;

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    /// Of the page. Empty: of the browser itself.
    session: String,
    last: u64,
    _profile: TempDir,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let profile = TempDir::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", START]).arg(profile.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let commands = process.stdin.take().unwrap();
        let mut messages = BufReader::new(process.stdout.take().unwrap());
        let (sender, answers) = channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while matches!(messages.read_until(0, &mut message), Ok(1..)) {
                let read = serde_json::from_slice(message.strip_suffix(&[0]).unwrap_or(&message));
                if sender.send(read.unwrap()).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut this = Self { process, commands, answers, session: String::new(), last: 0, _profile: profile };
        let target = this.call("Target.createTarget", &json!({"url": "about:blank"}))["targetId"].clone();
        let attached = this.call("Target.attachToTarget", &json!({"targetId": target, "flatten": true}));
        attached["sessionId"].as_str().unwrap().clone_into(&mut this.session);
        this.call("Page.enable", &json!({}));
        this
    }

    /// Calls a method of the page, and returns its result.
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        self.commands.flush().unwrap();
        loop {
            let mut answer = self.answers.recv_timeout(ANSWER).unwrap_or_else(|_| panic!("no answer to {method}"));
            if answer["id"] == self.last {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].take();
            }
        }
    }

    pub(crate) fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", &json!({"url": url}));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// What an expression in the page comes to; a promise is waited for.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let result = self.call("Runtime.evaluate", &parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Presses a key of the keyboard.
    pub(crate) fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Tab" => (9, ""),
            "ArrowRight" => (39, ""),
            _ => panic!("{key}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", &event);
        }
    }

    /// Types into what has the focus.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", &json!({ "text": text }));
    }

    /// Whether pages are to be dark.
    pub(crate) fn set_dark(&mut self, dark: bool) {
        let scheme = json!({"name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" }});
        self.call("Emulation.setEmulatedMedia", &json!({"features": [scheme]}));
    }

    /// The page as PNG.
    pub(crate) fn screenshot(&mut self) -> Vec<u8> {
        let taken = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        BASE64.decode(taken["data"].as_str().unwrap().as_bytes()).unwrap()
    }

    /// What a screen reader is given: role and name of each element that it does not leave out.
    pub(crate) fn accessible(&mut self) -> Vec<(String, String)> {
        let tree = self.call("Accessibility.getFullAXTree", &json!({}));
        let nodes = tree["nodes"].as_array().unwrap().iter().filter(|node| node["ignored"] == false);
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        nodes.map(|node| (text(&node["role"]), text(&node["name"]))).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
