//! The names that Go's `regexp` knows in `\p{…}`, whichever its version.
//!
//! Go 1.25 added aliases, other spellings, `Cn` and `LC`. They are left out: an older Go refuses them.

/// General categories. `Cs` is left out: no text that is valid UTF-8 has a surrogate.
const CATEGORIES: &str =
    "C Cc Cf Co L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs";

/// Scripts of Unicode 15.
const SCRIPTS: &str = "Adlam Ahom Anatolian_Hieroglyphs Arabic Armenian Avestan Balinese Bamum Bassa_Vah Batak Bengali Bhaiksuki \
     Bopomofo Brahmi Braille Buginese Buhid Canadian_Aboriginal Carian Caucasian_Albanian Chakma Cham Cherokee \
     Chorasmian Common Coptic Cuneiform Cypriot Cypro_Minoan Cyrillic Deseret Devanagari Dives_Akuru Dogra \
     Duployan Egyptian_Hieroglyphs Elbasan Elymaic Ethiopic Georgian Glagolitic Gothic Grantha Greek Gujarati \
     Gunjala_Gondi Gurmukhi Han Hangul Hanifi_Rohingya Hanunoo Hatran Hebrew Hiragana Imperial_Aramaic Inherited \
     Inscriptional_Pahlavi Inscriptional_Parthian Javanese Kaithi Kannada Katakana Kawi Kayah_Li Kharoshthi \
     Khitan_Small_Script Khmer Khojki Khudawadi Lao Latin Lepcha Limbu Linear_A Linear_B Lisu Lycian Lydian \
     Mahajani Makasar Malayalam Mandaic Manichaean Marchen Masaram_Gondi Medefaidrin Meetei_Mayek Mende_Kikakui \
     Meroitic_Cursive Meroitic_Hieroglyphs Miao Modi Mongolian Mro Multani Myanmar Nabataean Nag_Mundari \
     Nandinagari New_Tai_Lue Newa Nko Nushu Nyiakeng_Puachue_Hmong Ogham Ol_Chiki Old_Hungarian Old_Italic \
     Old_North_Arabian Old_Permic Old_Persian Old_Sogdian Old_South_Arabian Old_Turkic Old_Uyghur Oriya Osage \
     Osmanya Pahawh_Hmong Palmyrene Pau_Cin_Hau Phags_Pa Phoenician Psalter_Pahlavi Rejang Runic Samaritan \
     Saurashtra Sharada Shavian Siddham SignWriting Sinhala Sogdian Sora_Sompeng Soyombo Sundanese Syloti_Nagri \
     Syriac Tagalog Tagbanwa Tai_Le Tai_Tham Tai_Viet Takri Tamil Tangsa Tangut Telugu Thaana Thai Tibetan \
     Tifinagh Tirhuta Toto Ugaritic Vai Vithkuqi Wancho Warang_Citi Yezidi Yi Zanabazar_Square";

/// What the crate `regex` calls the class that Go calls `name`. `None` if Go knows no such class.
pub(super) fn query(name: &str) -> Option<String> {
    let is_in = |names: &str| names.split_ascii_whitespace().any(|one| one == name);
    if name == "Any" {
        return Some(name.to_owned());
    }
    let kind = if is_in(CATEGORIES) { "gc" } else { is_in(SCRIPTS).then_some("sc")? };
    Some(format!("{kind}={name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crate_knows_every_name() {
        for name in CATEGORIES.split_ascii_whitespace().chain(SCRIPTS.split_ascii_whitespace()).chain(["Any"]) {
            let class = format!(r"\p{{{}}}", query(name).unwrap());
            assert!(regex::Regex::new(&class).is_ok(), "{class}");
        }
    }
}
