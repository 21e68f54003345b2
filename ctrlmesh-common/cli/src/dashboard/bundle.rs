//! The files of the page. They are in the program, and load nothing from elsewhere.

/// A file of the page.
#[derive(Clone, Copy, Debug)]
pub(super) struct File {
    path: &'static str,
    pub(super) media_type: &'static str,
    pub(super) text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [File; 9] = [
    File { path: "/", media_type: HTML, text: include_str!("page/index.html") },
    File { path: "/page.css", media_type: STYLE, text: include_str!("page/page.css") },
    File { path: "/app.js", media_type: SCRIPT, text: include_str!("page/app.js") },
    File { path: "/dom.js", media_type: SCRIPT, text: include_str!("page/dom.js") },
    File { path: "/live.js", media_type: SCRIPT, text: include_str!("page/live.js") },
    File { path: "/overview.js", media_type: SCRIPT, text: include_str!("page/overview.js") },
    File { path: "/ring.js", media_type: SCRIPT, text: include_str!("page/ring.js") },
    File { path: "/root.js", media_type: SCRIPT, text: include_str!("page/root.js") },
    File { path: "/search.js", media_type: SCRIPT, text: include_str!("page/search.js") },
];

pub(super) fn file(path: &str) -> Option<File> {
    FILES.into_iter().find(|file| file.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a file loads: the texts between these words and a quotation mark.
    fn loaded(text: &str) -> Vec<String> {
        let starts = ["src=\"", "href=\"", "from \""];
        let of = |start: &'static str| text.split(start).skip(1).filter_map(|rest| rest.split('"').next());
        starts.into_iter().flat_map(of).filter(|path| !path.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn the_page_loads_only_files_of_its_own() {
        for File { path, text, .. } in FILES {
            for name in loaded(text) {
                let name = format!("/{}", name.trim_start_matches("./").trim_start_matches('/'));
                assert!(file(&name).is_some(), "{path} loads {name}");
            }
            assert!(!text.contains("innerHTML") && !text.contains(" style=") && !text.contains(" onclick="), "{path}");
        }
        assert!(loaded(FILES[0].text).len() >= 2);
        assert!(file("/other").is_none());
    }
}
