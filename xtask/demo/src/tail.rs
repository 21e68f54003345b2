//! Follows a file that somebody writes lines to, also where it is set aside for a new one.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// A file that is followed.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    file: Option<(u64, BufReader<File>)>,
    /// The beginning of a line whose end is not there yet.
    begun: String,
}

impl Tail {
    /// Follows the file at `path` from its beginning; it need not be there yet.
    pub fn of(path: PathBuf) -> Self {
        Self { path, file: None, begun: String::new() }
    }

    /// Gives each whole line that is new to `take`.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn lines(&mut self, mut take: impl FnMut(&str)) -> io::Result<()> {
        self.rest(&mut take)?;
        let Ok(now) = fs::metadata(&self.path) else { return Ok(()) };
        if self.file.as_ref().is_none_or(|(number, _)| *number != now.ino()) {
            self.file = Some((now.ino(), BufReader::new(File::open(&self.path)?)));
            self.begun.clear();
            self.rest(&mut take)?;
        }
        Ok(())
    }

    fn rest(&mut self, take: &mut impl FnMut(&str)) -> io::Result<()> {
        let Some((_, file)) = &mut self.file else { return Ok(()) };
        while file.read_line(&mut self.begun)? > 0 {
            if let Some(line) = self.begun.strip_suffix('\n') {
                take(line);
                self.begun.clear();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn whole_lines_are_given_once_also_of_the_file_that_comes_next() {
        let folder = std::env::temp_dir().join(format!("ctrlmesh-tail-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("log");
        let mut tail = Tail::of(path.clone());
        let mut new = || {
            let mut lines = Vec::new();
            tail.lines(|line| lines.push(line.to_owned())).unwrap();
            lines
        };
        assert!(new().is_empty());
        let mut file = File::create(&path).unwrap();
        write!(file, "one\ntw").unwrap();
        assert_eq!(new(), ["one"]);
        write!(file, "o\nthree\n").unwrap();
        assert_eq!(new(), ["two", "three"]);
        writeln!(file, "last").unwrap();
        fs::rename(&path, folder.join("log.old")).unwrap();
        fs::write(&path, "first\n").unwrap();
        assert_eq!(new(), ["last", "first"]);
        fs::remove_dir_all(&folder).unwrap();
    }
}
